"""Supervised fine-tuning, a reward model, and PPO with it: the shipped recipe, killed in each stage and resumed."""

import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from headway.deploy.recipe.recipe import Recipe
from headway.deploy.recipe.resolve import load_recipe
from headway.deploy.roles.held_out_evaluation import evaluate_checkpoint
from headway.deploy.roles.learner import recipe_updater, seed_generators
from headway.deploy.roles.recipe_backends import recipe_backend
from headway.deploy.roles.trained_model import original_recipe
from headway.deploy.run.run_directory import EXPERIENCE
from headway.deploy.run.stage_output import after_stages
from headway.learner.config import LayoutConfig
from headway.learner.experience.log import ExperienceLog
from headway.learner.objective.update import Updater
from headway.learner.ranks import Ranks
from headway.learner.stages.loop import TrainedStep, replay
from headway.learner.stages.stage_checkpoints import checkpoints_of
from tests.rollout_workers.reward_models import save_model

from .recipes import DENSE, write_recipe
from .records import lineage, summary
from .terminals import DEADLINE_S, Terminal, Terminals

pytestmark = pytest.mark.slow

RECIPE = "sft-rm-ppo.yaml"
STEPS = 25
FEW = 8
LONG = 200
"""Steps of a stage that is not over before a test sees its first ones."""
SHORTER = (f"learner.steps={STEPS}", "checkpoint.every_steps=5", "evaluation.prompts=0")
STAGES = (Path("sft"), Path("stages", "2-reward_model"))
BY_THE_RULE = ("rewards=[{kind: arithmetic}]", "evaluation.pass_reward=1.0")


def test_a_chain_that_is_killed_in_each_stage_ends_with_a_better_policy(terminals: Terminals) -> None:
    whole = terminals.open("whole", "run", RECIPE, "--until", "reward_model")
    run = terminals.directory("killed") / "runs" / "sft-rm-ppo"
    first = terminals.open("killed", "run", RECIPE, *SHORTER)
    _kill(first, run / "sft.metrics.jsonl", 40)
    assert not (run / STAGES[0]).exists()
    second = terminals.open("killed", "run", RECIPE, *SHORTER, "--resume")
    _kill(second, run / "stages" / "2-reward_model.metrics.jsonl", 30)
    assert not (run / STAGES[1]).exists()
    third = terminals.open("killed", "run", RECIPE, *SHORTER, "--resume")
    _kill(third, run / "metrics.jsonl", 8)
    whole.succeeds()
    for stage in STAGES:
        of_whole = whole.directory / "runs" / "sft-rm-ppo" / stage / "model.safetensors"
        assert (run / stage / of_whole.name).read_bytes() == of_whole.read_bytes(), stage
    terminals.open("killed", "run", RECIPE, *SHORTER, "--resume").succeeds()

    steps = lineage(run / "metrics.jsonl")
    assert [step["step"] for step in steps] == list(range(STEPS))
    assert {step["incarnation"] for step in steps} == {1, 2}
    found = summary(run)
    assert found["reward_last"] > found["reward_first"] + 0.3
    (last,) = (run / "checkpoints").glob(f"*/step_{STEPS}")
    recipe = after_stages(original_recipe(run))
    again = _opened(recipe)
    replayed = list(replay(again, ExperienceLog(run / EXPERIENCE), range(STEPS)))
    assert [one.update.loss for one in replayed] == [step["loss"] for step in steps]
    assert len(again.models) == 3
    assert _equal(again, _opened(recipe, last)), "policy and critic are those of an uninterrupted learner"
    assert not _equal(again, _opened(recipe))
    before, after = (_right(model) for model in (run / "sft", last))
    assert after > before + 0.08, "a policy that only fools the reward model is right no more often"


def test_stages_that_are_killed_on_megatron_leave_the_same_models(terminals: Terminals) -> None:
    home = terminals.directory("killed")
    path = write_recipe(
        home, stages=_short_stages(), learner={"backend": "megatron"}, checkpoint={"stage_every_s": 0.2}
    )
    whole = terminals.open("whole", "run", path, "--until", "dpo", "checkpoint.stage_every_s=60")
    run = home / "runs" / "tiny"
    stages = (*STAGES, Path("stages", "3-dpo"))
    for stage, again in zip(stages, ((), ("--resume",), ("--resume",)), strict=True):
        _kill_once(terminals.open("killed", "run", path, *again), partial(_has_checkpoint, run / stage))
        assert not (run / stage).exists()
    terminals.open("killed", "run", path, "--resume", "--until", "dpo").succeeds()
    whole.succeeds()
    for stage in stages:
        of_whole = whole.directory / "runs" / "tiny" / stage / "model.safetensors"
        assert (run / stage / of_whole.name).read_bytes() == of_whole.read_bytes(), stage


def _has_checkpoint(stage: Path) -> bool:
    """Whether the stage has trained some steps, and written a checkpoint from which it can go on."""
    return _lines(Path(f"{stage}.metrics.jsonl")) >= 5 and any(checkpoints_of(stage).glob("*/step_*"))


def _short_stages() -> list[dict[str, Any]]:
    """Return stages of some seconds, each long enough to be killed in its middle."""
    task = {"min_operations": 1, "max_operations": 1}
    phase = {"kind": "arithmetic", "options": task, "learning_rate": 1e-2, "batch_size": 8, "max_steps": LONG}
    pairs = {"kind": "arithmetic", "options": {**task, "records": 8 * LONG, "error_rate": 0.4, "skip_rate": 0.5}}
    scored = {"data": pairs, "batch_size": 8, "learning_rate": 3e-3}
    trained = [{"kind": kind, "options": scored} for kind in ("reward_model", "dpo")]
    return [{"kind": "sft", "phases": [phase]}, *trained, {"kind": "rl"}]


def test_ppo_on_megatron_computes_what_fsdp_computes_though_it_is_killed(terminals: Terminals) -> None:
    """Policy, reference and a critic that starts from the reward model are each split over two pipeline stages.

    The policy has no experts: where two of them are nearly tied, backends that round differently may choose another
    one, and then train two different models.
    """
    home = terminals.directory("run")
    save_model(home / "rm", scores=True)
    model = str(home / "rm")
    path = write_recipe(
        home,
        model=DENSE,
        rewards=[{"kind": "reward_model", "path": model}],
        algorithm={"preset": "ppo", "critic": {"path": model, "learning_rate": 1e-3}, "kl": {"coefficient": 0.02}},
        learner={"steps": FEW, "backend": "megatron", "processes": 2, "layout": {"pipeline": 2}},
        checkpoint={"every_steps": 2},
    )
    run = home / "runs" / "tiny"
    first = terminals.open("run", "run", path)
    _kill_once(first, (run / "checkpoints" / "1" / "step_2").exists)
    terminals.open("run", "run", path, "--resume").succeeds()

    steps = lineage(run / "metrics.jsonl")
    assert [step["step"] for step in steps] == list(range(FEW))
    assert {step["incarnation"] for step in steps} == {1, 2}
    replayed, learner = _replayed_by_fsdp(original_recipe(run), run)
    assert [step["loss"] for step in steps] == pytest.approx([one.update.loss for one in replayed], abs=1e-4)
    for step, one in zip(steps, replayed, strict=True):
        for name in ("value_loss", "value_mean", "value_grad_norm", "kl_reference"):
            assert step["algorithm"][name] == pytest.approx(one.update.algorithm[name], rel=1e-3, abs=1e-5), name
    assert abs(steps[0]["algorithm"]["value_mean"]) > 1e-4, "a critic with a head of its own starts with values of 0"
    (last,) = (run / "checkpoints").glob(f"*/step_{FEW}")
    left = load_file(last / "model.safetensors")
    policy: Any = learner.models[0]
    for name, tensor in policy.named_tensors():
        torch.testing.assert_close(left[name], tensor, rtol=0, atol=1e-3)


def _replayed_by_fsdp(recipe: Recipe, run: Path) -> tuple[list[TrainedStep], Updater]:
    """Train the run's batches with an uninterrupted learner of one process."""
    learner = msgspec.structs.replace(recipe.learner, backend="fsdp", processes=1, layout=LayoutConfig())
    again = _opened(msgspec.structs.replace(recipe, learner=learner))
    return list(replay(again, ExperienceLog(run / EXPERIENCE), range(FEW))), again


def _kill(terminal: Terminal, record: Path, steps: int) -> None:
    """Send SIGKILL to the command once the record has so many steps."""
    _kill_once(terminal, lambda: _lines(record) >= steps)


def _lines(record: Path) -> int:
    return len(record.read_text().splitlines()) if record.exists() else 0


def _kill_once(terminal: Terminal, is_due: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_due():
        assert terminal.exit_code() is None, terminal.tail()
        assert time.monotonic() < deadline, terminal.tail()
        time.sleep(0.05)
    terminal.send(signal.SIGKILL)
    terminal.wait()


def _opened(recipe: Recipe, checkpoint: Path | None = None) -> Updater:
    """Open the updater of policy and critic, with the recipe's models or those of a checkpoint."""
    seed_generators(recipe.run.seed)
    backend = recipe_backend(recipe)
    updater = recipe_updater(recipe, backend, Ranks.of(backend))
    if checkpoint is not None:
        backend.load(checkpoint)
        updater.load(checkpoint)
    return updater


def _equal(left: Updater, right: Updater) -> bool:
    """Whether policy, reference and critic are the same, bit for bit, and so are their optimizers."""
    pairs = zip(map(_tensors, left.models), map(_tensors, right.models), strict=True)
    return all(
        one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())
        for one, other in pairs
    )


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return parameters, moments and step counters."""
    tensors = dict(model._module.named_parameters())
    for name, parameter in tuple(tensors.items()):
        tensors |= {f"{name}.{key}": value for key, value in model._optimizer.state[parameter].items()}
    return {name: getattr(tensor, "full_tensor", tensor.clone)() for name, tensor in tensors.items()}


def _right(model: Path) -> float:
    """Return the share of held-out prompts that the model answers rightly, by the task's own rule."""
    return evaluate_checkpoint(load_recipe(RECIPE, BY_THE_RULE), model, None).pass_rate
