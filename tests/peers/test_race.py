"""The one definition of the race, and how the drivers of Headway and of TRL read it. TRL itself is not needed."""

import os
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmarks.peers import contestants, of_headway
from benchmarks.peers.__main__ import main as peers
from benchmarks.peers.of_trl import Clock, TrlSetting, Verifier, config_of, prompts_of, row_of
from benchmarks.peers.race import LONG_TAILED, SHORT, TASKS, Race
from benchmarks.processes import finish_group
from headway.broker.errors import ConfigError
from headway.deploy.recipe.resolve import load_recipe
from headway.learner.data.examples import open_examples
from headway.learner.data.prompts import open_source
from headway.learner.models.pretrained import load_tokenizer
from tests.learner.tiny import model_config
from tests.peers.races import race_in

ROOT = Path(__file__).parents[2]


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
    others = ("kl.coefficient=0.1", "entropy_coefficient=0.1", "dynamic_sampling=2")
    for override in ("algorithm.preset=gspo", *(f"algorithm.{other}" for other in others)):
        with pytest.raises(ConfigError, match="not the loss of the race"):
            race_in(tmp_path, override).load()


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


def test_all_contestants_have_one_sampler(race: Race, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str | None] = []
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "")
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER")
    monkeypatch.setattr(contestants, "warm_up", lambda *_: said.append(os.environ.get("VLLM_USE_FLASHINFER_SAMPLER")))
    for given in (None, "1"):
        if given:
            monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", given)
        monkeypatch.setattr(sys, "argv", ["peers", "--output", race.output, "--of", "", "--unjudged"])
        assert peers() == 0
    assert said == ["0", "1"]


def test_an_interpreter_is_found_from_every_directory(
    race: Race, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[Path] = []

    def run(_name: str, _race: Race, python: Path, _timeout_s: float) -> None:
        given.append(python)
        raise TimeoutError

    monkeypatch.chdir(tmp_path)
    (tmp_path / "verl.sh").touch(mode=0o755)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(contestants, "warm_up", lambda *_: None)
    monkeypatch.setattr(contestants, "run", run)
    place = ["--output", race.output, "--gpus", "1", "--of", "verl-sync-packed", "--unjudged"]
    monkeypatch.setattr(sys, "argv", ["peers", *place, "--python", "./verl.sh"])
    assert peers() == 1
    assert given == [tmp_path / "verl.sh"]


def test_who_needs_gpus_says_so() -> None:
    assert not contestants.lacking("headway", 0)
    assert "--gpus 1 or 2" in contestants.lacking("trl-async", 0)
    assert "--gpus 1 or 2" in contestants.lacking("verl-sync-packed", 0)


def test_without_trl_the_program_says_how_to_get_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.peers", "--output", str(tmp_path), "--python", "/nowhere"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "`make race` installs TRL" in done.stderr
    on_gpu, on_cpu = contestants.default(1, SHORT), contestants.default(0, SHORT)
    assert set(on_gpu) < set(on_cpu) <= set(contestants.NAMES)
    assert contestants.default(0, LONG_TAILED) == on_cpu
    assert set(contestants.default(2, LONG_TAILED)) <= set(contestants.NAMES)
