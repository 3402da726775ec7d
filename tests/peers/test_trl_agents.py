"""The race of agents. TRL itself is not needed."""

import pickle
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import trl_agents
from benchmarks.peers.calculator_desk import CalculatorDesk
from benchmarks.peers.of_trl import Judge, prompts_of
from benchmarks.peers.of_trl_async import async_config_of
from benchmarks.peers.race import AGENT, TASKS, Race
from headway.deploy.recipe.resolve import load_recipe
from headway.rollout_workers.agents.formats import open_format
from tests.peers.races import race_in
from tests.rollout_workers.agents.chat_models import MODELS, save_chat_model

CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "417*12"}}\n</tool_call><|im_end|>'


@pytest.fixture
def race(tmp_path: Path) -> Race:
    """Return a race of agents whose model has a tokenizer."""
    task = TASKS[AGENT]["cuda"]
    one = race_in(tmp_path, *task.overrides, recipe=task.recipe, gpus=1)
    one.model.mkdir()
    save_chat_model(one.model, MODELS["no_tools"])
    (one.model / "config.json").write_text('{"model_type": "llama", "eos_token_id": 2}')
    return one


def tokenizer_of(race: Race) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(race.model)


def test_trl_reads_the_turns_of_an_episode_as_headways_model_does(race: Race) -> None:
    recipe, tokenizer = race.load(), tokenizer_of(race)
    prompts = prompts_of(recipe, 1, tokenizer)
    (row, *_) = trl_agents.rows_of(recipe, prompts, tokenizer)
    desk = CalculatorDesk()
    desk.reset(**row)

    def read(messages: list[Any]) -> list[int]:
        found: list[int] = tokenizer.apply_chat_template(
            messages, tools=[desk.calculate], return_dict=False, add_generation_prompt=True
        )
        return found

    begun, sampled = read(row["prompt"]), list(tokenizer(CALL).input_ids)
    answer = tokenizer.parse_response(sampled, prefix=begun)
    assert answer["tool_calls"][0]["function"] == {"name": "calculate", "arguments": {"expression": "417*12"}}
    result = {"role": "tool", "name": "calculate", "content": desk.calculate("417*12")}
    assert result["content"] == "5004"
    chat_format = open_format(race.model, (tokenizer.convert_tokens_to_ids("<|im_end|>"),), "chatml")
    bridge = chat_format.bridge([*begun, *sampled], [result], trl_agents.tools_of(recipe))
    assert bridge
    assert read([*row["prompt"], {"content": "", **answer}, result]) == [*begun, *sampled, *bridge]


def test_the_warm_up_teaches_what_both_read(race: Race) -> None:
    recipe, tokenizer = race.load(), tokenizer_of(race)
    (prompt, *_) = prompts_of(recipe, 1, tokenizer)
    (row, *_) = trl_agents.rows_of(recipe, [prompt], tokenizer)
    text = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
    marks: Any = load_recipe(race.recipe).warm_up[0].options["marks"]
    assert text == f"{marks['input_begin']}{prompt.text}{marks['input_end']}"
    assert f"{marks['call_begin']}417*12{marks['call_end']}" == CALL


def test_trls_limits_are_those_of_the_recipe(race: Race) -> None:
    config, recipe = async_config_of(race, "/m", "http://engine"), race.load()
    assert config["max_completion_length"] == recipe.agent.max_turn_tokens == 128
    assert config["max_tool_calling_iterations"] == 7, "and one answer more"
    assert config["per_device_train_batch_size"] * config["gradient_accumulation_steps"] == 128
    assert (config["max_inflight_tasks"], config["queue_maxsize"], config["max_staleness"]) == (1024, 512, 3)
    of_episode = trl_agents.limits_of(recipe, is_of_turn=False)
    assert of_episode["max_completion_length"] == recipe.sampling.max_new_tokens
    assert pickle.loads(pickle.dumps(trl_agents.factory_of(recipe))) is CalculatorDesk  # TRL pickles it by its name


async def test_an_episode_is_judged_by_its_last_answer(race: Race) -> None:
    said: dict[str, Any] = {"role": "assistant", "content": "#47"}
    call: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [{}]}
    episodes = [[call, {"role": "tool", "content": "47"}, said], [call, {"role": "tool", "content": "#47"}], [call]]
    assert trl_agents.last_answers(episodes) == ["#47", "", ""]
    end = tokenizer_of(race).convert_tokens_to_ids("<|im_end|>")
    rewards = await Judge(race)(
        prompts=[[{"role": "user", "content": "^40+7="}]] * 4,
        completions=[*episodes, [said]],
        completion_ids=[[end], [end], [end], [end + 1]],
        ground_truth=["47"] * 4,
        data_source=["arithmetic"] * 4,
        extra=["{}"] * 4,
    )
    assert rewards == [1.0, 0.0, 0.0, 0.0], "the last one's answer was cut"
