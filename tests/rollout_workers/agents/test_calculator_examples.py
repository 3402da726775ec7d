"""The examples that warm a model up for the calculator are, token for token, what an episode of theirs is."""

import re
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headway.broker.user_code.import_paths import ImportRoots
from headway.deploy.recipe.resolve import load_recipe
from headway.learner.config import ModelConfig, RandomModelConfig, SftPhaseConfig
from headway.learner.data.examples import Example, open_examples
from headway.learner.data.prompts.arithmetic import OPERATORS
from headway.learner.data.prompts.rendering import Renderer
from headway.learner.models.pretrained import load_tokenizer
from headway.learner.stages.sft import tokenize
from headway.rollout_workers.agents.conversation import ChatFormat
from headway.rollout_workers.agents.episode import AgentEpisode, AgentTask
from headway.rollout_workers.agents.formats import open_format
from headway.rollout_workers.agents.formats.options import AgentFormatOptions
from headway.rollout_workers.agents.tasks.calculator import Calculator, CalculatorOptions

MARKS: dict[str, Any] = {"call_begin": "[", "call_end": "]", "result_begin": "<", "result_end": ">"}
CHAINS = {"largest": 99, "modulus": 100, "max_operations": 4}


class Tokens:
    """An episode's tokens, where the model writes what an example has."""

    def __init__(self, form: ChatFormat, tokenizer: Any, example: Example) -> None:
        self._form, self._tokenizer = form, tokenizer
        self._written = iter([*(writes for writes, _ in example.turns), example.response])
        self._known = 0
        self.token_ids: list[int] = []
        self.mask: list[int] = []
        self.prompt_length = 0

    async def call(self, path: str, asked: dict[str, Any]) -> Any:
        messages, tools = asked["messages"], asked["tools"]
        new = messages[self._known :]
        self._read(self._form.bridge(self.token_ids, new, tools) if self._known else self._form.render(new, tools))
        self._known = len(messages) + 1
        sampled = list(self._tokenizer(next(self._written)).input_ids)
        sampled += [] if sampled[-1] in self._form.stop_token_ids else [self._tokenizer.eos_token_id]
        self.token_ids += sampled
        self.mask += [1] * len(sampled)
        parsed = self._form.parse(sampled, tools)
        return {
            "content": parsed.content,
            "tool_calls": msgspec.to_builtins(parsed.tool_calls),
            "message": parsed.message(),
            "finish_reason": "tool_calls" if parsed.tool_calls else "stop",
            "token_ids": sampled,
        }

    def _read(self, token_ids: list[int] | None) -> None:
        assert token_ids is not None
        self.token_ids += token_ids
        self.mask += [0] * len(token_ids)
        self.prompt_length = self.prompt_length or len(token_ids)


async def compare(tokenizer: Any, form: ChatFormat, config: SftPhaseConfig, instructions: str, modulus: int) -> None:
    """Play the first examples as episodes; their tokens, and what is trained of them, are the examples'."""
    agent = Calculator(CalculatorOptions(instructions=instructions), ImportRoots(), "agent.options")
    for example in islice(open_examples(config, 0), 50):
        played = Tokens(form, tokenizer, example)
        (chain,) = re.findall(r"\^[-+*0-9]+=", example.query)
        truth = re.findall(r"#(\d+)", example.response)[0]
        task = AgentTask(id="t", text=chain, messages=[{"role": "user", "content": chain}],
                    ground_truth=truth, extra_info={"modulus": modulus})  # fmt: skip
        outcome = await agent.rollout(AgentEpisode("", "", played.call), task)
        assert isinstance(outcome, dict)
        assert (outcome["reward"], outcome["tool_errors"]) == (1.0, 0.0)
        trained = tokenize(example, tokenizer, Renderer(tokenizer))
        assert trained.token_ids.tolist() == played.token_ids
        assert [0] * trained.prompt_length + trained.loss_mask.tolist() == played.mask


@pytest.mark.parametrize("careless", [{}, {"error_rate": 0.3, "skip_rate": 0.4}])
async def test_examples_are_the_tokens_of_their_episodes(tmp_path: Path, careless: dict[str, float]) -> None:
    alphabet = "0123456789=#^?" + OPERATORS + "".join(MARKS.values())
    tokenizer: Any = load_tokenizer(ModelConfig(random=RandomModelConfig(architecture="qwen3", alphabet=alphabet)))
    tokenizer.save_pretrained(tmp_path)
    options = AgentFormatOptions(**MARKS, unknown_character="?")
    form = open_format(tmp_path, (tokenizer.eos_token_id,), "plain", options=options)
    config = SftPhaseConfig(kind="calculator", options={"task_options": CHAINS, "marks": MARKS, **careless})
    await compare(tokenizer, form, config, "", 100)


@pytest.mark.parametrize("phase", [0, 1])
async def test_the_marks_of_a_recipe_are_those_of_chatml(tmp_path: Path, phase: int) -> None:
    recipe = load_recipe("gpu/agent-tools.yaml")
    alphabet = "".join(map(chr, [*range(32, 127), *range(161, 256)])) + "\n"
    tokenizer: Any = load_tokenizer(ModelConfig(random=RandomModelConfig(architecture="qwen3", alphabet=alphabet)))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"], "eos_token": "<|im_end|>"})
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path)
    form = open_format(tmp_path, (tokenizer.eos_token_id,), recipe.agent.format.kind)
    config = recipe.warm_up[phase]
    modulus = recipe.prompts.options["modulus"]
    await compare(tokenizer, form, config, str(recipe.agent.options["instructions"]), modulus)
