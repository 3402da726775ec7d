"""TRL's side of a race of agents: the rows, the chat template and the judge with which it plays the recipe's
`environment_factory`. It reads, token for token, what Headway's model reads first."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headway.broker.schema import Prompt
from headway.broker.user_code.import_paths import ImportRoots
from headway.deploy.recipe.recipe import Recipe
from headway.rollout_workers.agents.conversation import Message, Tool
from headway.rollout_workers.agents.formats import open_format
from headway.rollout_workers.agents.formats.chatml import ChatML
from headway.rollout_workers.agents.kinds.environment_factory import EnvironmentFactoryOptions
from headway.rollout_workers.agents.tools.typed_functions import TypedFunction

KIND = "environment_factory"
TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{ '\\n' if not loop.first and messages[loop.index0 - 1].role == 'tool' else '<|im_start|>user\\n' }}
{{- '<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' }}
{%- else -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] -%}
{{ '\\n' if message.content or not loop.first }}
{{- '<tool_call>\\n{"name": ' + call.function.name | tojson + ', "arguments": ' }}
{{- call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{{ '<|im_start|>assistant\\n' if add_generation_prompt }}"""
"""Headway's ChatML for TRL. The tools are in the system message of its rows already, so it writes none."""
ANSWERS = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}
"""How transformers reads an answer, as TRL has it for models that call tools as Hermes does."""


def is_of_agents(recipe: Recipe) -> bool:
    """Return whether the recipe's samples are episodes of an agent."""
    return bool(recipe.agent.kind)


def options_of(recipe: Recipe) -> EnvironmentFactoryOptions:
    """Return the options of the recipe's agent, which TRL must have in the same form."""
    assert recipe.agent.kind == KIND, "TRL plays classes in the form of its own alone"
    assert recipe.agent.format.kind == "chatml", "its template here is ChatML's"
    return msgspec.convert(recipe.agent.options, EnvironmentFactoryOptions)


def factory_of(recipe: Recipe) -> Any:
    """Return the class that both play, which TRL pickles by its name."""
    factory = options_of(recipe).factory
    return ImportRoots((factory,)).load(factory, "agent.options.factory")


def tools_of(recipe: Recipe) -> list[Tool]:
    """Return its tools as Headway describes them to the model."""
    own = factory_of(recipe)
    names = [name for name in vars(own) if not name.startswith("_") and name not in ("reset", "get_reward", "close")]
    return [TypedFunction(getattr(own(), name), "the race", name).schema for name in names]


def messages_of(recipe: Recipe, prompt: Prompt) -> list[Message]:
    """Return what an episode begins with: the system describes the tools, as it does in Headway's."""
    system = [{"role": "system", "content": options_of(recipe).system_prompt}]
    return ChatML().as_text([*system, {"role": "user", "content": prompt.text}], tools_of(recipe))


def rows_of(recipe: Recipe, prompts: Sequence[Prompt], tokenizer: Any) -> list[dict[str, Any]]:
    """Return the prompts as rows, of which the class resets itself and the judge scores. The tokenizer writes and reads
    conversations as Headway does from then on."""
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, ANSWERS
    rows = [
        {
            **prompt.extra_info,
            "prompt": messages_of(recipe, prompt),
            "ground_truth": prompt.ground_truth,
            "data_source": prompt.data_source,
            "extra": msgspec.json.encode(prompt.extra_info).decode(),
        }
        for prompt in prompts
    ]
    read = tokenizer.apply_chat_template(rows[0]["prompt"], return_dict=False, add_generation_prompt=True)
    assert read == headways(recipe, prompts[0], tokenizer), "TRL's model must read what Headway's reads"
    return rows


def headways(recipe: Recipe, prompt: Prompt, tokenizer: Any) -> list[int]:
    """Return the tokens with which an episode of Headway's begins."""
    chat_format = open_format(Path(tokenizer.name_or_path), (tokenizer.eos_token_id,), recipe.agent.format.kind)
    system = {"role": "system", "content": options_of(recipe).system_prompt}
    return chat_format.render([system, {"role": "user", "content": prompt.text}], tools_of(recipe))


def limits_of(recipe: Recipe, *, is_of_turn: bool) -> dict[str, Any]:
    """Return the arguments of TRL's trainers that limit an episode; the asynchronous one's length is of a turn."""
    longest = recipe.agent.max_turn_tokens if is_of_turn else None
    return {
        "max_tool_calling_iterations": options_of(recipe).max_turns - 1,
        "max_completion_length": longest or recipe.sampling.max_new_tokens,
    }


def last_answers(completions: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
    """Return the last text of each episode; '' for one that ends with a call or its answer, which is no result."""
    last = [messages[-1] if messages else {} for messages in completions]
    is_said = [one.get("role") == "assistant" and not one.get("tool_calls") for one in last]
    return [str(one["content"]) if said else "" for one, said in zip(last, is_said, strict=True)]
