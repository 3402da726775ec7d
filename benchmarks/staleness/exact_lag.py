"""A warmed-up start, and a run from it: the product's parts in one thread, with a lag that is exact."""

import asyncio
import os
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from headway.broker.schema import Group, Prompt, Trajectory, TrajectoryId, VersionSpan, WeightVersion
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.recipe.resolve import load_recipe
from headway.deploy.roles.learner import recipe_updater
from headway.deploy.roles.recipe_backends import recipe_backend
from headway.deploy.roles.trained_model import own_decoding
from headway.deploy.roles.workerless_stage import fine_tune
from headway.deploy.terminal import Terminal
from headway.learner.algorithm_config import AlgorithmConfig
from headway.learner.backends.base import Backend
from headway.learner.config import ModelConfig
from headway.learner.data.prompts import open_prompts
from headway.learner.data.prompts.cursor import PromptCursor
from headway.learner.models.pretrained import load_tokenizer
from headway.learner.ranks import Ranks
from headway.rollout_workers.decoding import response_text
from headway.rollout_workers.engines.base import FinishReason, GenerationRequest, NamedTensors
from headway.rollout_workers.engines.embedded.decoder import Decoder, Sample, Sampler
from headway.rollout_workers.engines.embedded.slot_cache import ATTENTION
from headway.rollout_workers.engines.weight_loading.named_tensors import load_tensors
from headway.rollout_workers.rewards import Score, open_reward

from .trial import Outcome, Settings, Trial

CPU = torch.device("cpu")
HELD_OUT_SEED = 0
"""The seed with which held-out prompts are sampled: the same noise for all weights."""
SEEDS_APART = 1_000_000
"""Every step of every seed samples with noise of its own, the same for all compositions and lags."""


class Rollouts:
    """A policy that samples. A batch depends on its weights, prompts and seed alone."""

    def __init__(self, recipe: Recipe, model_dir: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation=ATTENTION)
        self._model = model.eval().requires_grad_(False)
        self._version = WeightVersion(0, 0)
        self._decoding = own_decoding(ModelConfig(path=str(model_dir)), recipe.sampling)
        self._scorer = asyncio.run(open_reward(recipe.rewards))
        self._sampling = recipe.sampling
        self._max_model_len = recipe.engine.max_model_len

    def load(self, version: WeightVersion, tensors: NamedTensors) -> None:
        """Sample from these weights from now on."""
        load_tensors(self._model, tensors)
        self._version = version

    def sample(self, prompts: Sequence[Prompt], seed: int) -> list[Group]:
        """Return `num_samples` responses to each prompt, scored."""
        samples = [self._sample(prompt) for prompt in prompts for _ in range(prompt.num_samples)]
        decoder = Decoder(self._model, len(samples), self._max_model_len, Sampler(seed, CPU), CPU, self._version)
        for sample in samples:
            decoder.add(sample)
        while decoder.running:
            decoder.step()
        trajectories = iter(self._trajectories(prompts, samples))
        return [
            Group(prompt=prompt, round=0, trajectories=tuple(islice(trajectories, prompt.num_samples)))
            for prompt in prompts
        ]

    def _sample(self, prompt: Prompt) -> Sample:
        request = GenerationRequest(
            request_id=prompt.group,
            prompt_tokens=prompt.token_ids,
            max_new_tokens=self._sampling.max_new_tokens,
            temperature=self._sampling.temperature,
            top_p=self._sampling.top_p,
            top_k=self._sampling.top_k,
            stop_token_ids=list(self._decoding.stop_token_ids),
        )
        limit = min(len(prompt.token_ids) + request.max_new_tokens, self._max_model_len)
        return Sample(request, limit, list(prompt.token_ids))

    def _trajectories(self, prompts: Sequence[Prompt], responses: Sequence[Sample]) -> Iterator[Trajectory]:
        """Yield trajectories in the prompts' order, each as many times as it has samples."""
        places = [(prompt, index) for prompt in prompts for index in range(prompt.num_samples)]
        scores = asyncio.run(self._scores([prompt for prompt, _ in places], responses))
        for (prompt, index), response, score in zip(places, responses, scores, strict=True):
            yield Trajectory(
                tid=TrajectoryId(prompt.group, 0, index),
                prompt_tokens=np.asarray(prompt.token_ids, np.int32),
                response_tokens=np.asarray(response.response, np.int32),
                behavior_logprobs=np.asarray(response.logprobs, np.float32),
                loss_mask=np.ones(len(response.logprobs), np.uint8),
                spans=(VersionSpan(0, len(response.logprobs), self._version),),
                reward=score.total,
                rewards=dict(score.components),
                finish_reason=_reason_of(response),
                worker="study",
            )

    async def _scores(self, prompts: Sequence[Prompt], responses: Sequence[Sample]) -> list[Score]:
        texts = [response_text(self._decoding, response.response) for response in responses]
        asked = zip(prompts, texts, map(_reason_of, responses), strict=True)
        return [await self._scorer.score(prompt, text, reason) for prompt, text, reason in asked]


def _reason_of(response: Sample) -> FinishReason:
    assert response.finish_reason is not None
    return response.finish_reason


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

    def step(self, step: int) -> None:
        """Sample with old weights, train the newest, after an evaluation if it is due."""
        settings = self._trial.settings
        if step % settings.evaluate_every == 0:
            self._evaluate(step, self._held_out_prompts[: settings.held_out_often])
        self.rollouts.load(*self._versions[0])
        prompts = self._cursor.next(settings.groups_per_step)
        groups = self.rollouts.sample(prompts, seed=(self._trial.seed + 1) * SEEDS_APART + step)
        scored = self._updater.compute_advantages(groups, step)
        update = self._updater.update(self._updater.pack(scored.sequences), step)
        self._versions.append(weights(self._backend, step + 1))
        lag = max((int(sequence.lags.max()) for sequence in scored.sequences), default=0)
        self._note({"lag": lag, "reward": scored.rewards.mean, "grad_norm": update.grad_norm, **update.algorithm})

    def outcome(self) -> Outcome:
        """Return the outcome after the last step."""
        final = self._evaluate(self._trial.settings.steps, self._held_out_prompts)
        return Outcome(trial=self._trial, final=final, held_out=self._held_out, curves=dict(self._curves))

    def _evaluate(self, steps: int, prompts: list[Prompt]) -> float:
        self.rollouts.load(*self._versions[-1])
        groups = self.rollouts.sample(prompts, seed=HELD_OUT_SEED)
        passed = fmean(one.reward >= self._pass_reward for group in groups for one in group.trajectories)
        self._held_out.append((steps, round(passed, 4)))
        return round(passed, 4)

    def _note(self, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            self._curves[name].append(float(f"{number:.4g}"))  # JSON has no NaN: msgspec writes null


def weights(backend: Backend, step: int) -> tuple[WeightVersion, list[tuple[str, torch.Tensor]]]:
    """Return a copy of the weights as they are."""
    return WeightVersion(0, step), [(name, tensor.clone()) for name, tensor in backend.named_tensors()]
