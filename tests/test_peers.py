"""The race with TRL: its one definition, how both drivers read it, and the comparison. TRL itself is not needed."""

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from pyarrow import parquet

from benchmarks.peers import comparison, contestants, engine_idle, of_headway, of_verl
from benchmarks.peers.figures import Figures, Step, figures_of
from benchmarks.peers.gpu_idle import Look, idle, looking
from benchmarks.peers.kept import BEFORE, Kept
from benchmarks.peers.of_trl import Clock, Judge, TrlSetting, Verifier, config_of, prompts_of, row_of
from benchmarks.peers.of_trl_async import ALL, NO_TOOLS, AsyncClock, PathKernel, async_config_of
from benchmarks.peers.processes import finish_group
from benchmarks.peers.race import LONG_TAILED, SHORT, TASKS, Race
from broker import BlockingBroker
from broker.errors import BrokerError, ConfigError
from broker.schema import RunStatus, WorkerInfo
from broker.server.embedded import EmbeddedServer
from deploy.recipe.loading import load_recipe
from deploy.run.directory import endpoint
from deploy.run.events import HeartbeatEvent, StepEvent
from deploy.run.stage_output import mark_complete
from learner.data.examples import open_examples
from learner.data.prompts import open_source
from learner.models.model import load_model, load_tokenizer
from tests.broker.scenario import FRESH, rules
from tests.broker.topologies import wait_until
from tests.deploy.runs import bare_metrics, open_record, run_status, worker
from tests.learner.tiny import model_config

VERL = tuple(of_verl.SETTINGS[name] for name in ("verl-sync", "verl-async"))
ROOT = Path(__file__).parents[1]


def race_in(output: Path, *overrides: str, **changes: Any) -> Race:
    return Race(**{"recipe": "arithmetic.yaml", "overrides": overrides, "output": str(output), **changes})


@pytest.fixture
def race(tmp_path: Path) -> Race:
    """Return a race whose model is there."""
    one = race_in(tmp_path, "learner.steps=3", "learner.groups_per_step=4", "optimizer.learning_rate=3e-4")
    load_model(model_config("qwen3_moe")).save_pretrained(one.model)
    load_tokenizer(model_config("qwen3_moe")).save_pretrained(one.model)
    return one


def test_headway_runs_the_race_from_the_warmed_up_model(tmp_path: Path) -> None:
    race = race_in(tmp_path, "learner.steps=7", "run.seed=5")
    command, recipe, *arguments = of_headway.arguments(race)
    ours, given = load_recipe(recipe, [one for one in arguments if "=" in one]), race.load()
    assert command == "run"
    assert (ours.model.path, ours.warm_up, ours.run_directory) == (str(race.model), (), tmp_path / "headway")
    assert (ours.learner, ours.optimizer, ours.algorithm) == (given.learner, given.optimizer, given.algorithm)
    assert (ours.checkpoint.every_steps, ours.evaluation.prompts, ours.run.seed) == (7, 0, 5)


def test_headways_own_overrides_are_its_alone_and_the_users_overrule_them(tmp_path: Path) -> None:
    for given, found in (((), 1), (("staleness.max_lag=4",), 4)):
        race = race_in(tmp_path, *given, own=("staleness.max_lag=1",))
        _, recipe, *arguments = of_headway.arguments(race)
        assert load_recipe(recipe, [one for one in arguments if "=" in one]).staleness.max_lag == found
        assert race.load().staleness.max_lag == (4 if given else 2)


def test_on_a_gpu_both_generate_with_vllm(race: Race) -> None:
    on_gpu = msgspec.structs.replace(race, gpus=1)
    recipe, trl = on_gpu.load(), config_of(on_gpu, TrlSetting(), "/m")
    assert (recipe.engine.kind, recipe.engine.device, recipe.learner.device) == ("vllm", "cuda", "cuda")
    assert (trl["use_vllm"], trl["vllm_mode"], trl["use_cpu"]) == (True, "colocate", False)


def test_on_two_gpus_headways_engines_have_one_and_each_process_of_trl_trains_half(race: Race) -> None:
    on_two = msgspec.structs.replace(race, gpus=2)
    recipe, trl = on_two.load(), config_of(on_two, TrlSetting(), "/m")
    assert (recipe.learner.processes, set(recipe.workers.devices)) == (1, {1})
    assert (trl["per_device_train_batch_size"], trl["steps_per_generation"]) == (16, 1)
    beside = msgspec.structs.replace(on_two, second_gpu="3")  # of a machine where others race
    assert set(beside.load().workers.devices) == {3}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("task", TASKS)
def test_every_task_is_a_race_on_every_device(tmp_path: Path, task: str, device: str) -> None:
    recipe, overrides = msgspec.structs.astuple(TASKS[task][device])
    loaded = race_in(tmp_path, *overrides, recipe=recipe, gpus=int(device == "cuda")).load()
    assert loaded.warm_up
    assert loaded.evaluation.prompts >= 256


def test_a_long_tailed_task_has_responses_many_times_as_long_as_most(tmp_path: Path) -> None:
    task = TASKS[LONG_TAILED]["cpu"]
    recipe = race_in(tmp_path, *task.overrides, recipe=task.recipe).load()
    examples = islice(open_examples(recipe.warm_up[0], recipe.run.seed), 2000)
    tokens = np.array([len(example.response) + 1 for example in examples])  # and the end of the text
    assert (np.median(tokens), tokens.max()) == (16, recipe.sampling.max_new_tokens - 12)
    prompts = open_source(recipe.prompts, recipe.run.seed)
    longest = max(len(str(prompts.train(0, at).content)) for at in range(2000))
    assert longest + recipe.sampling.max_new_tokens <= recipe.engine.max_model_len


def test_trl_trains_as_many_samples_in_as_many_updates_at_the_same_rate(race: Race) -> None:
    whole, parted = (config_of(race, TrlSetting(micro_batches=count), "/m") for count in (1, 4))
    assert (whole["per_device_train_batch_size"], whole["steps_per_generation"], whole["max_steps"]) == (32, 1, 3)
    assert (parted["per_device_train_batch_size"], parted["gradient_accumulation_steps"]) == (8, 4)
    assert (whole["num_generations"], whole["max_completion_length"], whole["learning_rate"]) == (8, 32, 3e-4)
    twice = config_of(race_in(Path(race.output), "learner.updates_per_step=2"), TrlSetting(), "/m")
    assert (twice["per_device_train_batch_size"], twice["steps_per_generation"], twice["max_steps"]) == (128, 2, 120)


def test_trl_gets_the_prompts_that_headway_feeds_in_their_order(race: Race) -> None:
    recipe = race.load()
    tokenizer, source = load_tokenizer(model_config("qwen3_moe")), open_source(recipe.prompts, recipe.run.seed)
    prompts = prompts_of(recipe, 3, tokenizer)
    rows = [row_of(prompt) for prompt in prompts]
    assert [row["prompt"] for row in rows] == [source.train(0, position).content for position in range(12)]
    assert [row["ground_truth"] for row in rows] == [source.train(0, position).ground_truth for position in range(12)]
    assert [prompt.token_ids for prompt in prompts] == [tokenizer(row["prompt"]).input_ids for row in rows]


def test_trls_model_reads_the_conversation_that_headways_reads(race: Race) -> None:
    recipe = race.load(["prompts.system_prompt=1+1"])
    tokenizer = load_tokenizer(model_config("qwen3_moe"))
    tokenizer.chat_template = "{% for message in messages %}#{{ message.content }}{% endfor %}#"
    (first, *_) = prompts_of(recipe, 1, tokenizer)
    assert first.text == f"#1+1#{open_source(recipe.prompts, recipe.run.seed).train(0, 0).content}#"


async def test_trls_samples_are_judged_by_headways_reward(race: Race) -> None:
    tokenizer, clock = load_tokenizer(model_config("qwen3_moe")), Clock(time.time())
    end, answers = tokenizer.eos_token_id, [tokenizer(text).input_ids for text in ("4*5=0#0", "4*5=0#1", "4*5=0#0")]
    responses = [[*answers[0], end], [*answers[1], end], answers[2]]  # right, wrong, cut off
    columns = {"ground_truth": ["0"] * 3, "data_source": ["arithmetic"] * 3, "extra": ["{}"] * 3}
    verifier = Verifier(race.load(), race.model, clock)
    assert await verifier.score(["^4*5="] * 3, responses, **columns, trainer_state=None) == [1.0, 0.0, 0.0]
    clock.add_generation(0.25)
    clock.end_step()
    (step,) = clock.steps
    assert (step.samples, step.tokens, round(step.reward, 3), step.learner_idle_s) == (3, 23, 0.333, 0.25)


def test_another_loss_is_no_race(tmp_path: Path) -> None:
    for override in ("algorithm.preset=gspo", "algorithm.kl.coefficient=0.1", "algorithm.dynamic_sampling=2"):
        with pytest.raises(ConfigError, match="not the loss of the race"):
            race_in(tmp_path, override).load()


def steps_of(*ends_s: float, samples: int = 4) -> list[Step]:
    return [Step(end_s=end, samples=samples, tokens=10, reward=0.5, learner_idle_s=0.25) for end in ends_s]


def test_first_steps_do_not_count_towards_speeds() -> None:
    one = figures_of(steps_of(50, 60, 61, 62), engine_idle=0.0, pause_per_update_s=None, first=2)
    assert (one.samples_per_s, one.tokens_per_s, one.response_tokens, one.learner_idle) == (4.0, 10.0, 2.5, 0.25)
    assert (one.first_step_s, one.seconds, one.ends_s) == (50, 62, [50, 60, 61, 62])
    assert (one.engine_idle, one.pause_per_update_s) == (0.0, None)


def test_a_synchronous_trainer_pauses_generation_for_all_of_an_update() -> None:
    clock = Clock(time.time())
    clock.steps, clock.generating_s = steps_of(10, 12, 14), [9.0, 0.5, 1.5]
    one = clock.figures(first=1)
    assert (one.engine_idle, one.pause_per_update_s) == (0.5, 1.0)


def test_headways_files_become_figures(tmp_path: Path) -> None:
    record = open_record(tmp_path)
    for step in range(3):
        values = {"trajectories": 8, "response_tokens_mean": 5.0, "reward_mean": 0.5, "take_s": 0.5, "lag_mean": 1.0}
        metrics = bare_metrics(incarnation=1, step=step, time_s=2.0 * (step + 1), step_s=2.0, **values)
        record.write(StepEvent(metrics=metrics, tids=()))
    look = msgspec.structs.replace(run_status(), workers=(told("a", 0.0), told("b", 0.0)))
    record.write(HeartbeatEvent.later(look, step=2, time_s=6.5))
    os.utime(tmp_path / "metrics.jsonl", (1000.0, 1000.0))
    reports = {
        "a": [(996.0, 1.0), (1000.0, 3.0)],
        "b": [(996.0, 0.0), (998.0, 2.0), (1000.0, 4.0)],
        "early": [(990.0, 0.0)],
    }
    one = of_headway.read_figures(tmp_path, 970.0, reports)
    assert one.ends_s == [26.0, 28.0, 30.0]
    assert (one.samples_per_s, one.tokens_per_s, one.learner_idle, one.lag_mean) == (4.0, 20.0, 0.25, 1.0)
    assert (one.engine_idle, one.pause_per_update_s) == (0.25, 0.05)


def told(name: str, busy_s: float) -> WorkerInfo:
    return msgspec.structs.replace(worker(name, None), busy_s=busy_s, swaps=10, swap_s=0.5)


def test_idle_time_of_engines_is_of_the_steps_that_count_however_few_reports_there_are() -> None:
    a, b = [(10.0, 4.0), (12.0, 6.0), (16.0, 6.0)], [(13.0, 0.0), (13.5, 0.5)]
    assert engine_idle.idle({"a": a}, 11.0, 13.0) == pytest.approx(0.5)  # busy until 12
    assert engine_idle.idle({"a": a}, 12.5, 13.5) == 1.0  # between two reports
    assert engine_idle.idle({"a": a, "b": b}, 11.0, 20.0) == pytest.approx(0.4)  # of the times that are known
    assert engine_idle.idle({"a": a[:1], "b": b}, 14.0, 20.0) is None
    assert engine_idle.idle({}, 0.0, 1.0) is None


def test_what_workers_report_is_read_from_the_runs_server(server: EmbeddedServer, tmp_path: Path) -> None:
    with engine_idle.reports_of(tmp_path / "tiny") as seen, closing(BlockingBroker(server.url, "tiny")) as client:
        client.call(client.broker.batches.claim(checkpoint=FRESH, rules=rules(2), config=b"", resume=False))
        (tmp_path / "tiny").mkdir()
        with endpoint(tmp_path / "tiny", server.url, "tiny"):
            between = []
            for busy_s in (0.5, 0.75):
                sent = time.time()
                client.call(client.broker.status.heartbeat(told("a", busy_s), 60.0))
                wait_until(lambda: seen.get("a", [(0.0, 0.0)])[-1][1] == busy_s)  # noqa: B023  # called at once
                between.append((busy_s, sent - 0.01, time.time() + 0.01))
    assert [at for at, _ in seen["a"]] == sorted(at for at, _ in seen["a"])
    assert {busy_s for _, busy_s in seen["a"]} == {0.5, 0.75}
    for busy_s, first, last in between:
        assert all(first <= at <= last for at, of_report in seen["a"] if of_report == busy_s)


def test_reports_are_followed_to_another_server(server: EmbeddedServer, tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "stale") as stale, engine_idle.reports_of(tmp_path / "tiny") as seen:
        (tmp_path / "tiny").mkdir()
        for one, name in ((stale, "old"), (server, "new")):
            with closing(BlockingBroker(one.url, "tiny")) as client, endpoint(tmp_path / "tiny", one.url, "tiny"):
                client.call(client.broker.batches.claim(checkpoint=FRESH, rules=rules(2), config=b"", resume=False))
                client.call(client.broker.status.heartbeat(told(name, 0.5), 60.0))
                wait_until(lambda: name in seen)  # noqa: B023  # called at once


def test_a_failing_look_opens_the_server_anew_and_a_worker_without_a_session_is_skipped(
    server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[BlockingBroker] = []
    call = BlockingBroker.call

    def followed(self: BlockingBroker, coroutine: Any) -> Any:
        answer = call(self, coroutine)
        if isinstance(answer, RunStatus) and self not in asked:
            asked.append(self)
            if len(asked) == 1:
                raise BrokerError("lost")
            return msgspec.structs.replace(answer, silences={})
        return answer

    with closing(BlockingBroker(server.url, "tiny")) as client:
        client.call(client.broker.batches.claim(checkpoint=FRESH, rules=rules(2), config=b"", resume=False))
        client.call(client.broker.status.heartbeat(told("a", 0.5), 60.0))
        monkeypatch.setattr(BlockingBroker, "call", followed)
        (tmp_path / "tiny").mkdir()
        with endpoint(tmp_path / "tiny", server.url, "tiny"), engine_idle.reports_of(tmp_path / "tiny") as seen:
            wait_until(lambda: "a" in seen)
    assert len(asked) == 2


def ran(speed: int, pass_rate: float) -> Figures:
    one = figures_of(steps_of(1, 2, samples=speed), engine_idle=None, pause_per_update_s=None)
    return msgspec.structs.replace(one, pass_rate=pass_rate)


def test_the_median_run_is_compared_with_the_best_setting_of_trl() -> None:
    ours, slow, best = [ran(90, 0.9), ran(30, 0.95), ran(60, 0.93)], [ran(20, 0.99)], [ran(50, 0.95)]
    rounds = {"headway": ours, "trl-1-thread": slow, "trl-all-threads": best}
    one = comparison.compared(rounds, before=0.3)
    assert (one["best_of_peers"], one["times_faster"], list(one["met"].values())) == (
        "trl-all-threads",
        1.2,
        [False, True, True, True],
    )
    assert (one["headway"]["pass_rate"], one["samples_per_s"]["headway"]) == (0.93, [90, 30, 60])
    worse = comparison.compared({"headway": [ran(90, 0.8)], "trl-all-threads": best}, before=0.3)
    assert list(worse["met"].values()) == [True, False, True, True]
    assert "met" not in comparison.compared({"headway": ours, "trl-1-thread": []}, before=0.3)


def learned(*rewards: float, step_s: float, first_s: float) -> Figures:
    ends = [first_s + step_s * at for at in range(len(rewards))]
    steps = [
        Step(end_s=end, samples=4, tokens=10, reward=reward, learner_idle_s=0.0)
        for end, reward in zip(ends, rewards, strict=True)
    ]
    return figures_of(steps, engine_idle=None, pause_per_update_s=None)


def test_rewards_are_compared_after_equal_samples_and_after_equal_seconds() -> None:
    ours = learned(*[0.1] * 5, *[0.6] * 5, step_s=1, first_s=3)  # its last step ends after 12 seconds
    peer = learned(*[0.1] * 5, *[0.7] * 5, *[0.9] * 5, step_s=2, first_s=4)  # after 12 seconds five steps have ended
    assert comparison.rewards_beside(ours, peer) == {"equal samples": (0.6, 0.7), "equal seconds": (0.6, 0.1)}
    late = learned(0.5, 0.5, step_s=1, first_s=100)
    one = comparison.compared({"headway": [ours], "trl-1-thread": [late]}, before=0.3)
    assert one["reward_of_headway_and_peer"]["trl-1-thread"]["equal seconds"] == (0.6, None)
    assert list(one["met"].values())[-2:] == [False, True]  # 0.1 against 0.5 after two steps; theirs have not ended


def test_idle_time_of_gpus_is_of_the_steps_that_count() -> None:
    seen: list[Look] = [(1.0, [100.0, 100.0]), (5.0, [20.0, 60.0]), (6.0, [40.0, 80.0]), (9.0, [0.0, 0.0])]
    assert idle(seen, 4.0, 8.0) == [0.7, 0.3]
    assert idle([(5.0, [])], 4.0, 8.0) is None  # a machine without nvidia-smi
    with looking(0) as of_none:
        assert of_none == []


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
    for reward, sync in ((0.5, {}), (0.7, {"perf/weight_sync_s": 0.3}), (0.6, {}), (0.8, {"perf/weight_sync_s": 0.5})):
        clock.note({**log, "reward": reward, "sample/staleness_mean": 1.0, **sync})
    one = clock.figures()
    assert (one.rewards, one.samples_per_step, one.response_tokens, one.lag_mean) == ([0.6, 0.7], 8.0, 5.0, 1.0)
    assert (one.pause_per_update_s, one.first_step_s, one.engine_idle) == (0.4, 50.0, None)


def test_verl_trains_as_many_samples_in_as_many_updates(tmp_path: Path) -> None:
    recipe, overrides = msgspec.structs.astuple(TASKS[SHORT]["cuda"])
    race = race_in(tmp_path, *overrides, recipe=recipe, gpus=2)
    sync, alone = (dict(one.split("=", 1) for one in of_verl.overrides_of(race, one, tmp_path)) for one in VERL)
    for one in (sync, alone):
        assert (one["data.train_batch_size"], one["actor_rollout_ref.rollout.n"]) == ("32", "16")
        assert one["actor_rollout_ref.actor.ppo_mini_batch_size"] == "8"
        assert (one["trainer.total_training_steps"], one["data.max_response_length"]) == ("40", "96")
    assert (sync["trainer.n_gpus_per_node"], alone["trainer.n_gpus_per_node"]) == ("2", "1")
    assert alone["trainer.v1.separate_async.parameter_sync_step"] == "4"


def test_verls_packed_rows_attend_as_separate_ones() -> None:
    import benchmarks.peers.verl_attention  # noqa: F401  # it registers the attention

    torch.manual_seed(0)
    apart = load_model(model_config("qwen3_moe")).eval()
    packed = load_model(model_config("qwen3_moe")).eval()
    packed.load_state_dict(apart.state_dict())
    packed.set_attn_implementation(of_verl.ATTENTION)
    rows = [torch.randint(5, 15, (1, count)) for count in (7, 3, 5)]
    positions = torch.cat([torch.arange(row.shape[1]) for row in rows])[None]
    together = packed(input_ids=torch.cat(rows, 1), attention_mask=None, position_ids=positions).logits
    alone = torch.cat([apart(input_ids=row).logits for row in rows], 1)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_verls_command_leaves_what_is_set(race: Race, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_LOGGING_LEVEL", "INFO")
    monkeypatch.setenv("PYTHONPATH", "/there")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    of_command = of_verl.environment_of(race, Path("/run"))
    assert (of_command["VERL_LOGGING_LEVEL"], of_command["NCCL_NVLS_ENABLE"]) == ("INFO", "0")
    assert of_command["RAY_memory_monitor_refresh_ms"] == "0"
    assert of_command["PYTHONPATH"] == f"{ROOT}:/there"
    assert msgspec.json.decode(of_command[of_verl.RACE], type=Race) == race


def test_verl_reads_the_conversations_that_headways_model_reads(race: Race) -> None:
    tokenizer = load_tokenizer(model_config("qwen3_moe"))
    tokenizer.chat_template = "{% for message in messages %}#{{ message.content }}{% endfor %}#"
    tokenizer.save_pretrained(race.model)
    spoken = msgspec.structs.replace(race, overrides=(*race.overrides, "prompts.system_prompt=1+1"))
    of_verl.write_prompts(spoken, race.model / "prompts.parquet")
    rows = parquet.read_table(race.model / "prompts.parquet").to_pylist()
    source = open_source(race.load().prompts, race.load().run.seed)
    assert len(rows) == (3 + of_verl.AHEAD) * 4
    assert rows[5]["prompt"] == [
        {"role": "system", "content": "1+1"},
        {"role": "user", "content": source.train(0, 5).content},
    ]
    assert rows[5]["reward_model"]["ground_truth"] == source.train(0, 5).ground_truth


def test_verls_metrics_become_figures_as_they_are_written(tmp_path: Path) -> None:
    file, began = tmp_path / "metrics.jsonl", time.time()
    metrics = {"timing_s/gen": 1.0, "timing_s/step": 4.0, "response_length/mean": 5.0, "critic/score/mean": 0.5}
    with of_verl.following(file) as lines, file.open("a") as written:
        for step in range(2):
            written.write(json.dumps({"step": step, "data": metrics}) + "\n")
            written.flush()
            wait_until(lambda: len(lines) == step + 1)  # noqa: B023  # called before the next step
    timed = [
        (began + 10.0, metrics),
        (began + 16.0, {**metrics, "timing_s/step": 6.0, "timing_s/save_checkpoint": 2.0}),
    ]
    one = of_verl.figures_from(timed, began, samples=8, is_sync=True)
    assert (one.ends_s, one.samples_per_s, one.response_tokens) == ([10.0, 14.0], 2.0, 5.0)
    assert (one.engine_idle, one.pause_per_update_s, one.learner_idle) == (0.75, 3.0, 0.25)


def test_a_run_that_has_ended_is_not_made_again(tmp_path: Path) -> None:
    one = figures_of(steps_of(1.0, 2.0), engine_idle=None, pause_per_update_s=None)
    later = msgspec.structs.replace(one, samples_per_s=9.0)
    solved = msgspec.structs.replace(later, pass_rate=0.5)
    race = race_in(tmp_path)
    go_on, anew = Kept(tmp_path, race, is_read=True), Kept(tmp_path, race, is_read=False)
    assert go_on.figures("headway-0", lambda: one, None) == one
    assert go_on.figures("headway-0", lambda: later, None) == one
    assert anew.figures("headway-0", lambda: later, None) == later
    assert go_on.figures("headway-0", lambda: one, lambda _: solved) == solved
    assert go_on.figures("headway-0", lambda: one, lambda _: one) == solved


def test_figures_of_another_race_are_refused(tmp_path: Path) -> None:
    names, one = ["headway-0"], figures_of(steps_of(1.0, 2.0), engine_idle=None, pause_per_update_s=None)
    Kept(tmp_path, race_in(tmp_path, "learner.steps=20"), is_read=True).figures("headway-0", lambda: one, None)
    same = race_in(tmp_path, "learner.steps=20", "evaluation.prompts=8", second_gpu="3")
    Kept(tmp_path, same, is_read=True).check(names)
    other = race_in(tmp_path, "learner.steps=30", "learner.group_size=4")
    Kept(tmp_path, other, is_read=False).check(names)  # it makes the run anew
    Kept(tmp_path, other, is_read=True).check(["trl-1-thread-0"])  # a contestant may have steps of its own
    with pytest.raises(ConfigError, match=r"learner.group_size is 8, not 4, learner.steps is 20, not 30: give another"):
        Kept(tmp_path, other, is_read=True).check(names)
    (tmp_path / "figures" / "headway-0.json").write_bytes(msgspec.json.encode(one))  # as older versions kept them
    with pytest.raises(
        ConfigError, match=r"of the kept figures of headway-0 in .* nothing says which race: give another"
    ):
        Kept(tmp_path, same, is_read=True).check(names)


def test_a_race_killed_while_it_keeps_figures_leaves_none_beside_the_settings_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = figures_of(steps_of(1.0, 2.0), engine_idle=None, pause_per_update_s=None)
    other = msgspec.structs.replace(ours, samples_per_s=9.0)
    races = [race_in(tmp_path, f"learner.steps={steps}") for steps in (20, 30)]
    for allowed in range(3):  # of the renames of the second race; the process is killed at the next one
        Kept(tmp_path, races[0], is_read=False).figures("headway-0", lambda: ours, None)
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            move = until_killed(allowed)
            patch.setattr(Path, "rename", move)
            patch.setattr(Path, "replace", move)
            Kept(tmp_path, races[1], is_read=False).figures("headway-0", lambda: other, None)
        read = [readable(Kept(tmp_path, race, is_read=True)) for race in races]
        assert read in ([ours, None], [None, other])


def until_killed(allowed: int) -> Callable[[Path, Path], None]:
    left = iter(range(allowed))

    def move(path: Path, target: Path) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        os.replace(path, target)

    return move


def readable(kept: Kept) -> Figures | None:
    try:
        kept.check(["headway-0"])
    except ConfigError:
        return None
    return kept.figures("headway-0", lambda: pytest.fail("made again"), None)


def test_figures_that_another_race_put_there_meanwhile_are_refused(tmp_path: Path) -> None:
    one = figures_of(steps_of(1.0, 2.0), engine_idle=None, pause_per_update_s=None)
    kept = Kept(tmp_path, race_in(tmp_path), is_read=True)
    kept.check(["headway-0"])
    Kept(tmp_path, race_in(tmp_path, "learner.steps=3"), is_read=False).figures("headway-0", lambda: one, None)
    with pytest.raises(ConfigError, match=r"learner\.steps is 3, not"):
        kept.figures("headway-0", lambda: one, None)


def test_kept_figures_of_a_peer_are_of_any_overrides_that_are_headways_alone(tmp_path: Path) -> None:
    one = figures_of(steps_of(1.0, 2.0), engine_idle=None, pause_per_update_s=None)
    for name in ("trl-1-thread-0", "headway-0"):
        Kept(tmp_path, race_in(tmp_path), is_read=True).figures(name, lambda: one, None)
    fresher = Kept(tmp_path, race_in(tmp_path, own=("staleness.max_lag=1",)), is_read=True)
    fresher.check(["trl-1-thread-0"])
    with pytest.raises(ConfigError, match=r"own is \[\], not"):
        fresher.check(["headway-0"])


def test_the_pass_rate_of_another_warmed_up_model_is_refused(tmp_path: Path) -> None:
    race = race_in(tmp_path)
    assert Kept(tmp_path, race, is_read=True).before(lambda: 0.25) == 0.25
    same = Kept(tmp_path, race_in(tmp_path, "learner.steps=3", gpus=1), is_read=True)
    same.check([BEFORE])
    assert same.before(lambda: pytest.fail("measured again")) == 0.25
    for change in ("model.path=other", "evaluation.prompts=8", "run.seed=9"):
        other = Kept(tmp_path, race_in(tmp_path, change), is_read=True)
        key, value = change.split("=")
        said = rf"kept figures of before in .*{key.removeprefix('run.')} is .*, not {value}[,:].* give another"
        with pytest.raises(ConfigError, match=said):
            other.check([BEFORE])
        with pytest.raises(ConfigError, match=said):
            other.before(lambda: 0.5)
    (tmp_path / "figures" / "before.json").write_text("0.25")  # as older versions kept it
    with pytest.raises(ConfigError, match=r"of the kept figures of before in .* nothing says which race"):
        same.check([BEFORE])


def test_an_output_whose_model_was_warmed_up_otherwise_is_refused(tmp_path: Path) -> None:
    race = race_in(tmp_path)
    race.model.mkdir()
    mark_complete(race.model, race.load(), {})
    Kept(tmp_path, race_in(tmp_path, "learner.steps=3", "evaluation.prompts=8"), is_read=False).check([])
    with pytest.raises(ConfigError, match=r"has a model that other settings have warmed up: give another"):
        Kept(tmp_path, race_in(tmp_path, "run.seed=9"), is_read=False).check([])


def test_an_output_of_another_task_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "task").write_text("arithmetic.yaml")
    command = [sys.executable, "-m", "benchmarks.peers", "--output", str(tmp_path), "--of", "", "--task", LONG_TAILED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert f"--output {tmp_path} is of the recipe arithmetic.yaml, not of " in done.stderr
    assert not (tmp_path / "sft").exists()


def test_no_process_of_a_peer_outlives_its_command(tmp_path: Path) -> None:
    said = tmp_path / "child"
    script = f"setsid sleep 600 & echo $! > {said}; wait"  # a group of its own, as torchrun's ranks have
    with pytest.raises(subprocess.TimeoutExpired):
        finish_group(["sh", "-c", script], 3.0, os.environ)
    try:
        state = (Path("/proc") / said.read_text().strip() / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return
    assert state.rsplit(")", 1)[1].split()[0] == "Z"


def test_who_needs_gpus_says_so() -> None:
    assert not contestants.lacking("headway", 0)
    assert "--gpus 2" in contestants.lacking("trl-async", 1)
    assert "--gpus 1 or 2" in contestants.lacking("verl-sync", 0)


def test_without_trl_the_program_says_how_to_get_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.peers", "--output", str(tmp_path), "--python", "/nowhere"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "`make race` installs TRL" in done.stderr
    assert set(contestants.default(1)) < set(contestants.default(0)) <= set(contestants.NAMES)
