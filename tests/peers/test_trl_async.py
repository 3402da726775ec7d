"""The race with TRL's asynchronous trainer. TRL itself is not needed."""

import pickle
import time
from pathlib import Path

import msgspec
import pytest
import torch

from benchmarks.peers.of_trl import Judge, prompts_of
from benchmarks.peers.of_trl_async import ALL, NO_TOOLS, AsyncClock, PathKernel, async_config_of
from benchmarks.peers.race import LONG_TAILED, SHORT, TASKS, Race
from headway.learner.models.pretrained import load_tokenizer
from tests.learner.tiny import model_config
from tests.peers.races import race_in


def test_the_stand_in_for_the_hubs_kernel_attends_along_every_path() -> None:
    torch.manual_seed(0)
    shared, tails, heads = 3, (4, 2), 2  # two samples share three tokens; both have grouped heads
    query, key, value = (torch.randn(shared + sum(tails), count, 8) for count in (2 * heads, heads, heads))
    paths = [[0, 1, 2], [0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 7, 8]]
    cu_queries, cu_keys = torch.tensor([0, 3, 7, 9]), torch.tensor([0, 3, 10, 15])
    index = torch.tensor([at for path in paths for at in path])
    attended = PathKernel().flash_attn_varlen_func(
        query, key[index], value[index], cu_queries, cu_keys, 4, 7, softmax_scale=0.3, causal=True, window_size=(-1, -1)
    )
    for path in paths[1:]:
        keys, values = (of[path].repeat_interleave(2, dim=1).double() for of in (key, value))
        scores = 0.3 * torch.einsum("qhd,khd->hqk", query[path].double(), keys)
        scores += torch.full(scores.shape, -torch.inf).triu(1)
        alone = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        torch.testing.assert_close(attended[path].double(), alone, atol=1e-6, rtol=1e-6)


def test_trls_asynchronous_trainer_trains_as_many_samples_and_sends_weights_as_often(tmp_path: Path) -> None:
    for task, (passes, samples) in ((SHORT, (1, 128)), (LONG_TAILED, (4, 128))):
        recipe, overrides = msgspec.structs.astuple(TASKS[task]["cuda"])
        race = race_in(tmp_path, *overrides, recipe=recipe, gpus=2)
        race.model.mkdir(exist_ok=True)
        (race.model / "config.json").write_text('{"model_type": "llama"}')
        config, loaded = async_config_of(race, "/m", "http://engine"), race.load()
        assert (config["gradient_accumulation_steps"], config["per_device_train_batch_size"]) == (passes, samples)
        assert passes * samples * config["weight_sync_steps"] == race.samples_per_step == 512
        assert config["max_steps"] == loaded.learner.steps * loaded.learner.updates_per_step
        assert (config["token_budget"], config["max_staleness"]) == (0, loaded.staleness.max_lag)
        assert config["max_inflight_tasks"] == config["queue_maxsize"] == loaded.staleness.max_lag * 512
        assert pickle.loads(pickle.dumps(Judge(race)))  # its trainer pickles the rewards


async def test_trls_asynchronous_trainer_judges_as_the_other_one(race: Race) -> None:
    tokenizer = load_tokenizer(model_config("qwen3_moe"))
    right = [*tokenizer("4*5=0#0").input_ids, tokenizer.eos_token_id]
    columns = {"ground_truth": ["0"], "data_source": ["arithmetic"], "extra": ["{}"], "completions": [[]]}
    prompts = [[{"role": "user", "content": "^4*5="}]]
    assert await Judge(race)(prompts=prompts, completion_ids=[right], **columns) == [1.0]
    assert await Judge(race)(prompts=prompts, completion_ids=[right[:-1]], **columns) == [0.0]


def test_trls_asynchronous_trainer_reads_headways_prompts_and_takes_answers_for_text(race: Race) -> None:
    tokenizer = load_tokenizer(model_config("qwen3_moe"))
    (prompt, *_) = prompts_of(race.load(), 1, tokenizer)
    tokenizer.chat_template, tokenizer.response_template = ALL, NO_TOOLS
    read = tokenizer.apply_chat_template([{"role": "user", "content": prompt.text}], return_dict=False)
    assert read == list(prompt.token_ids)
    answer = tokenizer.parse_response(tokenizer("4*5=0#0").input_ids, prefix=read)
    assert answer == {"role": "assistant", "content": "4*5=0#0"}


def test_what_trls_asynchronous_trainer_logs_of_updates_becomes_steps() -> None:
    clock = AsyncClock(time.time() - 50, updates=2)
    log = {"batch/samples_per_step": 4.0, "batch/trained_tokens_per_step": 20.0, "perf/rollout_wait_s": 0.25}
    for reward in (0.5, 0.7, 0.6, 0.8):
        clock.note({**log, "reward": reward, "sample/staleness_mean": 1.0})
    one = clock.figures()
    assert (one.rewards, one.samples_per_step, one.response_tokens, one.lag_mean) == ([0.6, 0.7], 8.0, 5.0, 1.0)
    assert one.ends_s[0] == pytest.approx(50.0, abs=1.0)
