"""A student learns from its teacher by samples of old weights: by each place and anchor of the teacher's term.

    python -m benchmarks.stale_distillation --output DIR [--seeds 3] [--lags 4 16] [--steps 48] [--quick]

For each seed, the stages of `distill.yaml` make a teacher and spoil a copy of it into the student. Then each
composition trains the student with a lag that is exact: step k samples with the weights of step max(0, k - lag). All of
them have the same prompts, noise and learning rate, one update a step, and no reward. The last line is one JSON object:
by composition and lag the pass rate on held-out prompts of each seed, their mean, and the mean over the last quarter of
the steps of `reverse_kl`, the student's divergence from its teacher on its own (old) samples. Outcomes are kept in
DIR/runs.jsonl; a run that is in there is not run again.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import torch
from msgspec.structs import replace

from headway.algorithms.presets import PRESETS
from headway.broker.schema import Group, Prompt, WeightVersion
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.recipe.resolve import load_recipe
from headway.deploy.roles.backend import recipe_backend
from headway.deploy.roles.stage import fine_tune
from headway.deploy.run.stage_output import directory_of, mark_complete
from headway.deploy.terminal import Terminal
from headway.learner.batching.packing import concatenate, from_trajectory
from headway.rollout_workers.engines.base import NamedTensors

from .staleness.rollouts import Rollouts
from .staleness.training import Run, enter
from .staleness.trial import QUICK, Outcome, Settings, Trial, append_outcome, read_outcomes

RECIPE = "distill.yaml"
Keys = dict[str, Any]

_TAUGHT = PRESETS["distillation"].algorithm
COMPOSITIONS: dict[str, Keys] = {
    f"{place}/{anchor}": {
        **_TAUGHT,
        "objective": {**_TAUGHT["objective"], "anchor": anchor},
        "corrections": [{"kind": "truncated_is", "options": {}}] if anchor == "proximal" else [],
        "distillation": {"coefficient": 1.0, "place": place},
    }
    for place in ("advantage", "loss")
    for anchor in ("behavior", "proximal")
}
"""With the anchor `proximal` truncated importance weights correct for lag; with `behavior` the ratio itself does."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3, help="so many, from 0")
    parser.add_argument("--lags", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--quick", action="store_true", help="only show that everything runs")
    options = parser.parse_args()
    settings = QUICK if options.quick else Settings(steps=options.steps, learning_rate=5e-4)
    settings = replace(settings, group_size=2, held_out_often=min(settings.held_out, 128))
    options.output.mkdir(parents=True, exist_ok=True)
    enter()
    print(json.dumps(study(options.output.resolve(), settings, range(options.seeds), options.lags)))


def study(output: Path, settings: Settings, seeds: Sequence[int], lags: Sequence[int]) -> Keys:
    """Run what is left to run, and return the figures."""
    file, found = output / "runs.jsonl", []
    for seed in seeds:
        recipe = made(seed, settings, output / "starts")
        for lag in lags:
            for name, keys in COMPOSITIONS.items():
                trial = Trial(name=name, algorithm=keys, lag=lag, seed=seed, settings=settings)
                known = [one for one in read_outcomes(file) if one.trial == trial]
                if not known:
                    known = [taught(trial, recipe)]
                    append_outcome(file, known[0])
                found.append(known[0])
                print(f"{name} lag {lag} seed {seed}: {known[0].final:.3f}", file=sys.stderr, flush=True)
    return {name: {f"{lag}": figures_of(found, name, lag) for lag in lags} for name in COMPOSITIONS}


def figures_of(outcomes: Sequence[Outcome], name: str, lag: int) -> Keys:
    """Return the figures of a composition at a lag."""
    mine = [one for one in outcomes if (one.trial.name, one.trial.lag) == (name, lag)]
    last = [one.curves["reverse_kl"][-max(1, one.trial.settings.steps // 4) :] for one in mine]
    return {
        "pass_rates": [one.final for one in mine],
        "pass_rate": round(fmean(one.final for one in mine), 4),
        "before": round(fmean(one.held_out[0][1] for one in mine), 4),
        "reverse_kl": [round(fmean(value for value in each if value is not None), 4) for each in last],
    }


def made(seed: int, settings: Settings, directory: Path) -> Recipe:
    """Return the recipe of this seed, whose teacher and student have been made."""
    overrides = [f"run.seed={seed}", f"run.name=seed-{seed}", f"run.directory={directory}"]
    if settings.warm_up_steps:
        overrides.append(f"stages[0].phases[0].max_steps={settings.warm_up_steps}")
        overrides.append("stages[0].phases[0].until_pass_rate=0")
    recipe = load_recipe(RECIPE, [*overrides, f"evaluation.prompts={settings.held_out}"])
    for number in (0, 1):
        output = directory_of(recipe, number)
        if not (output / "model.safetensors").exists():
            with open(os.devnull, "w") as nowhere:
                outcome = fine_tune(recipe, output, console=Terminal(file=nowhere), number=number)
            mark_complete(output, recipe, outcome, number)
            print(f"seed {seed}: stage {number}: {outcome.pass_rate}", file=sys.stderr, flush=True)
    return recipe


def taught(trial: Trial, recipe: Recipe) -> Outcome:
    """Train the student by the trial's composition."""
    run = Run(trial, directory_of(recipe, 1))
    run.rollouts = TaughtRollouts(recipe, run.rollouts, directory_of(recipe, 0))
    for step in range(trial.settings.steps):
        run.evaluate_now_and_then(step)
        run.step(step)
    return run.outcome()


class TaughtRollouts(Rollouts):
    """Samples that come with a teacher's logprobs."""

    def __init__(self, recipe: Recipe, rollouts: Rollouts, teacher: Path) -> None:
        self._rollouts = rollouts
        self._teacher = recipe_backend(replace(recipe, model=replace(recipe.model, path=str(teacher), random=None)))

    def load(self, version: WeightVersion, tensors: NamedTensors) -> None:
        """Sample from these weights from now on."""
        self._rollouts.load(version, tensors)

    def sample(self, prompts: Sequence[Prompt], seed: int) -> list[Group]:
        """Return `num_samples` responses to each prompt."""
        groups = self._rollouts.sample(prompts, seed)
        sequences = [
            from_trajectory(one, advantages=0.0, step=0, max_lag=0) for group in groups for one in group.trajectories
        ]
        (logprobs_T,) = self._teacher.logprobs([concatenate(sequences)], 1.0)
        lengths = [len(sequence.token_ids) for sequence in sequences]
        parts = iter(zip(torch.split(logprobs_T, lengths), sequences, strict=True))
        return [msgspec.structs.replace(group, trajectories=_with(group, parts)) for group in groups]


def _with(group: Group, parts: Any) -> tuple[Any, ...]:
    return tuple(
        msgspec.structs.replace(one, teacher_logprobs=values_T[sequence.prompt_length :].numpy())
        for one, (values_T, sequence) in zip(group.trajectories, parts, strict=False)
    )


if __name__ == "__main__":
    main()
