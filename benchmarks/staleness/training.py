"""A warmed-up start, and a run from it: the product's parts in one thread, with a lag that is exact."""

import os
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

import msgspec
import torch
from msgspec.structs import replace

from headway.broker.schema import Prompt, WeightVersion
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.recipe.resolve import load_recipe
from headway.deploy.roles.backend import recipe_backend
from headway.deploy.roles.learner import recipe_updater
from headway.deploy.roles.stage import fine_tune
from headway.deploy.terminal import Terminal
from headway.learner.algorithm_config import AlgorithmConfig
from headway.learner.backends.base import Backend
from headway.learner.data.prompts import open_prompts
from headway.learner.data.prompts.cursor import PromptCursor
from headway.learner.models.pretrained import load_tokenizer
from headway.learner.ranks import Ranks

from .rollouts import Rollouts
from .trial import Outcome, Settings, Trial

HELD_OUT_SEED = 0
"""The seed with which held-out prompts are sampled: the same noise for all weights."""
SEEDS_APART = 1_000_000
"""Every step of every seed samples with noise of its own, the same for all compositions and lags."""


def enter() -> None:
    """Set up a process of the study: one core, and no progress bars."""
    from transformers.utils.logging import disable_progress_bar

    torch.set_num_threads(1)
    disable_progress_bar()


def make_start(seed: int, settings: Settings, directory: Path) -> float:
    """Warm up the demo's model as `headway run arithmetic.yaml` does, and return its pass rate."""
    recipe = study_recipe(seed, settings)
    if settings.warm_up_steps:
        short = {"max_steps": settings.warm_up_steps, "until_pass_rate": 0.0}
        phases = [(stage, [replace(phase, **short) for phase in stage.phases]) for stage in recipe.stages]
        recipe = replace(recipe, stages=tuple(replace(stage, phases=tuple(shorter)) for stage, shorter in phases))
    with open(os.devnull, "w") as nowhere:
        pass_rate = fine_tune(recipe, directory, console=Terminal(file=nowhere)).pass_rate
    assert pass_rate is not None, "the recipe has prompts"
    return pass_rate


def run_trial(trial: Trial, start: Path) -> Outcome:
    """Train from `start` with this composition, lag and seed. Equal trials give equal outcomes."""
    run = Run(trial, start)
    for step in range(trial.settings.steps):
        run.evaluate_now_and_then(step)
        run.step(step)
    return run.outcome()


def study_recipe(seed: int, settings: Settings) -> Recipe:
    """Return the demo's recipe, with the study's settings."""
    return load_recipe(
        "arithmetic.yaml",
        [
            f"run.seed={seed}",
            f"learner.steps={settings.steps}",
            f"learner.groups_per_step={settings.groups_per_step}",
            f"learner.group_size={settings.group_size}",
            f"optimizer.learning_rate={settings.learning_rate}",
            f"evaluation.prompts={settings.held_out}",
        ],
    )


def trial_recipe(trial: Trial, start: Path) -> Recipe:
    """Return the same recipe from this start, with the trial's composition and lag."""
    recipe = study_recipe(trial.seed, trial.settings)
    return replace(
        recipe,
        model=replace(recipe.model, path=str(start), random=None),
        algorithm=msgspec.convert(trial.algorithm, AlgorithmConfig),
        staleness=replace(recipe.staleness, max_lag=trial.lag),
    )


class Run:
    """One trial on its way."""

    def __init__(self, trial: Trial, start: Path) -> None:
        settings = trial.settings
        recipe = trial_recipe(trial, start)
        self._trial = trial
        self._backend = recipe_backend(recipe)
        self._updater = recipe_updater(recipe, self._backend, Ranks.of(self._backend))
        prompts = open_prompts(recipe.prompts, load_tokenizer(recipe.model), trial.seed)
        self._cursor = PromptCursor(prompts, num_samples=settings.group_size, seed=trial.seed)
        self._held_out_prompts = prompts.held_out(settings.held_out)
        self._pass_reward = recipe.evaluation.pass_reward
        self.rollouts = Rollouts(recipe, start)
        self._versions = deque([weights(self._backend, 0)], maxlen=trial.lag + 1)
        """The newest lag + 1 versions, oldest first."""
        self._held_out: list[tuple[int, float]] = []
        self._curves = defaultdict[str, list[float | None]](list)
        self._seconds = defaultdict[str, float](float)

    def step(self, step: int) -> None:
        """Sample with old weights, train the newest."""
        settings = self._trial.settings
        with self._timed("sample"):
            self.rollouts.load(*self._versions[0])
            prompts = self._cursor.next(settings.groups_per_step)
            groups = self.rollouts.sample(prompts, seed=(self._trial.seed + 1) * SEEDS_APART + step)
        with self._timed("train"):
            scored = self._updater.compute_advantages(groups, step)
            update = self._updater.update(self._updater.pack(scored.sequences), step)
        with self._timed("snapshot"):
            self._versions.append(weights(self._backend, step + 1))
        lag = max((int(sequence.lags.max()) for sequence in scored.sequences), default=0)
        self._note({"lag": lag, "reward": scored.rewards.mean, "grad_norm": update.grad_norm, **update.algorithm})

    def evaluate_now_and_then(self, step: int) -> None:
        """Evaluate before this step, if it is due."""
        settings = self._trial.settings
        if step % settings.evaluate_every == 0:
            self._evaluate(step, self._held_out_prompts[: settings.held_out_often])

    def outcome(self) -> Outcome:
        """Return the outcome after the last step."""
        final = self._evaluate(self._trial.settings.steps, self._held_out_prompts)
        return Outcome(
            trial=self._trial,
            final=final,
            held_out=self._held_out,
            curves=dict(self._curves),
            seconds={name: round(seconds, 2) for name, seconds in self._seconds.items()},
        )

    def _evaluate(self, steps: int, prompts: list[Prompt]) -> float:
        with self._timed("evaluate"):
            self.rollouts.load(*self._versions[-1])
            groups = self.rollouts.sample(prompts, seed=HELD_OUT_SEED)
        passed = fmean(one.reward >= self._pass_reward for group in groups for one in group.trajectories)
        self._held_out.append((steps, round(passed, 4)))
        return round(passed, 4)

    def _note(self, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            self._curves[name].append(float(f"{number:.4g}"))  # JSON has no NaN: msgspec writes null

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds[what] += time.perf_counter() - began


def weights(backend: Backend, step: int) -> tuple[WeightVersion, list[tuple[str, torch.Tensor]]]:
    """Return a copy of the weights as they are."""
    return WeightVersion(0, step), [(name, tensor.clone()) for name, tensor in backend.named_tensors()]
