"""A worker takes nothing from the configuration in the broker for which its own operator would have to answer."""

import asyncio
import sys

import pytest

from headway.broker import Broker
from headway.broker.client.learner import CheckpointMark
from headway.broker.errors import LASTING_EXIT, ConfigError
from headway.broker.schema import RunRules
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.recipe.resolve import load_recipe, recipe_from_bytes, recipe_to_bytes, with_overrides
from headway.deploy.recipe.trust import (
    check_stored,
    check_stored_scorers,
    passed_on,
    passed_on_to_scorers,
    roots_of,
)


def stored(*overrides: str) -> Recipe:
    """Return the recipe as a worker gets it."""
    return recipe_from_bytes(recipe_to_bytes(load_recipe("arithmetic.yaml", overrides)))


async def test_a_worker_that_finds_the_standard_library_in_its_configuration_runs_nothing(broker: Broker) -> None:
    """A client that can write to the broker has put the name there."""
    config = recipe_to_bytes(stored("rewards=[{kind: 'subprocess:Popen', signature: trl}]"))
    rules = RunRules(max_lag=1, groups_per_step=1)
    await broker.batches.claim(checkpoint=CheckpointMark(0, 0), rules=rules, config=config, resume=False)
    command = ("worker", "--broker", broker.url, "--run", broker.run)
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "headway", *command, stderr=asyncio.subprocess.PIPE
    )
    _, said = await asyncio.wait_for(worker.communicate(), 240)
    assert worker.returncode == LASTING_EXIT
    assert b"rewards[0].kind: 'subprocess:Popen' is not imported: 'subprocess' belongs to Python's standard" in said


VLLM = ("engine.kind=vllm", "engine.max_model_len=64")


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("rewards=[{kind: arithmetic}, {kind: 'subprocess:Popen'}]", r"rewards\[1\]\.kind"),
        ("rewards=[{kind: 'torch.hub:load'}]", r"rewards\[0\]\.kind"),
        ("engine.kind='subprocess:Popen'", r"engine\.kind"),
        ("environment.kind='subprocess:Popen'", r"environment\.kind"),
        ("weights.transport='subprocess:Popen'", r"weights\.transport"),
    ],
)
def test_a_stored_import_path_outside_of_the_roots_is_refused(override: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}: .*is not imported"):
        check_stored(stored(override), (), ())


def test_the_operator_may_name_modules_and_an_engine() -> None:
    check_stored(stored("rewards=[{kind: 'torch.hub:load'}]"), (), ("torch",))
    own = ("engine.kind='torch.hub:load'",)
    check_stored(with_overrides(stored(), own), own, ())


@pytest.mark.parametrize(
    "option",
    [
        "trust_remote_code=true",
        "worker_cls=my.Worker",
        "load_format=my_plugin",
        "distributed_executor_backend=my.Executor",
        "compilation_config={backend: 'my.backend'}",
        "logits_processors=['my:Processor']",
        "quantization='my.quantization'",
        "max_num_seqs='my.module'",
        "block_size={a: 1}",
    ],
)
def test_a_stored_option_that_may_run_code_is_refused_unless_the_operator_sets_it(option: str) -> None:
    recipe = stored(*VLLM, f"engine.options.{option}")
    with pytest.raises(ConfigError, match=rf"^engine\.options\.{option.partition('=')[0]} is not taken from the run's"):
        check_stored(recipe, (), ())
    own = (f"engine.options.{option}",)
    check_stored(with_overrides(recipe, own), own, ())


SCORERS = ("scorers.engine.kind=vllm",)


@pytest.mark.parametrize("option", ["worker_cls=my.Worker", "load_format=my_plugin", "hf_overrides={x: 1}"])
def test_what_a_scorer_might_run_its_own_operator_names(option: str) -> None:
    recipe, own = stored(*SCORERS, f"scorers.engine.options.{option}"), (f"scorers.engine.options.{option}",)
    with pytest.raises(
        ConfigError, match=rf"^scorers\.engine\.options\.{own[0].split('.')[3].split('=')[0]} is not tak"
    ):
        check_stored_scorers(recipe, ())
    check_stored_scorers(with_overrides(recipe, own), own)
    check_stored_scorers(stored(*SCORERS, "scorers.engine.options={enforce_eager: false}"), ())
    with pytest.raises(ConfigError, match=r"^scorers\.engine\.kind: .*is not imported"):
        check_stored_scorers(stored("scorers.engine.kind='torch.hub:load'"), ())


def test_the_recipe_of_ones_own_command_is_passed_on_to_its_scorers() -> None:
    recipe = load_recipe("arithmetic.yaml", [*SCORERS, "scorers.engine.options={load_format: x, block_size: 16}"])
    assert passed_on_to_scorers(recipe) == ['scorers.engine.options.load_format="x"']
    own = passed_on_to_scorers(load_recipe("arithmetic.yaml", ["scorers.engine.kind='torch.hub:load'"]))
    assert own == ["scorers.engine.kind=torch.hub:load"]
    other = with_overrides(recipe, own)
    assert other.scorers.engine.options == {}, "they are another engine's"
    check_stored_scorers(other, own).load("torch.hub:load", "scorers.engine.kind")


def test_sizes_and_switches_are_taken() -> None:
    options = "gpu_memory_utilization: 0.5, enforce_eager: true, cudagraph_capture_sizes: [1, 2], quantization: fp8"
    check_stored(stored(*VLLM, f"engine.options={{{options}, distributed_executor_backend: mp}}"), (), ())


def test_the_recipe_of_ones_own_command_is_passed_on_to_its_workers() -> None:
    recipe = load_recipe(
        "arithmetic.yaml",
        [*VLLM, "engine.options={load_format: x, block_size: 16}", "rewards=[{kind: 'torch.hub:load'}]"],
    )
    assert passed_on(recipe) == ["--allow-import", "torch.hub:load", 'engine.options.load_format="x"']
    own = ('engine.options.load_format="x"',)
    check_stored(with_overrides(recipe, own), own, ("torch.hub:load",))
    roots_of(recipe).load("torch.hub:load", "rewards.kind")
