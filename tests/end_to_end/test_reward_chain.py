"""Supervised fine-tuning, a reward model, PPO with it: the shipped recipe, killed in each stage and resumed."""

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from deploy.recipe.loading import load_recipe
from deploy.recipe.recipe import Recipe
from deploy.roles.backend import recipe_backend
from deploy.roles.evaluation import evaluate_checkpoint
from deploy.roles.learner import recipe_updater, seed_generators
from deploy.run.directory import EXPERIENCE
from deploy.run.stage_output import after_stages
from deploy.run.trained import original_recipe
from learner.experience.log import ExperienceLog
from learner.objective.update import Updater
from learner.ranks import Ranks
from learner.stages.replay import replay

from .records import lineage, summary
from .terminals import DEADLINE_S, Terminal, Terminals

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RECIPE = "sft-rm-ppo.yaml"
STEPS = 25
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


def _kill(terminal: Terminal, record: Path, steps: int) -> None:
    """SIGKILL to the command once the record has so many steps."""
    deadline = time.monotonic() + DEADLINE_S
    while not record.exists() or len(record.read_text().splitlines()) < steps:
        assert terminal.exit_code() is None, terminal.tail()
        assert time.monotonic() < deadline, terminal.tail()
        time.sleep(0.05)
    terminal.send(signal.SIGKILL)
    terminal.wait()


def _opened(recipe: Recipe, checkpoint: Path | None = None) -> Updater:
    """What trains policy and critic, with the models that the recipe starts from, or those of a checkpoint."""
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
    """Parameters, moments and step counters."""
    tensors = dict(model._module.named_parameters())
    for name, parameter in tuple(tensors.items()):
        tensors |= {f"{name}.{key}": value for key, value in model._optimizer.state[parameter].items()}
    return {name: getattr(tensor, "full_tensor", tensor.clone)() for name, tensor in tensors.items()}


def _right(model: Path) -> float:
    """The share of held-out prompts that the model answers rightly, by the task's own rule."""
    return evaluate_checkpoint(load_recipe(RECIPE, BY_THE_RULE), model, None).pass_rate
