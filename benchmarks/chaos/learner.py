"""One learner process: the product's, resuming from the newest checkpoint, with a double of the model.

The double has 64 numbers, real gradients, a step in a twentieth of a second, and a checkpoint of one small file.
"""

import hashlib
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from ctypes import c_int64
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file

from headway.broker import BlockingBroker
from headway.broker.schema import Group, SampleLimits, Trajectory, WeightVersion
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.roles import learner as training
from headway.deploy.roles.observer import RunObserver
from headway.learner.backends.base import Backend, Snapshot, TokenLoss
from headway.learner.backends.snapshots import save
from headway.learner.batching.batch import PackedBatch
from headway.learner.batching.packing import PackableSequence, rollouts_of
from headway.learner.checkpoint import read_checkpoint
from headway.learner.config import ModelConfig, OptimizerConfig
from headway.learner.stages import starting_point
from headway.learner.stages.loop import TrainedStep

from . import episodes
from .audit import Beginning, StepRecord, Trail, Trained
from .pills import is_pill
from .process import enter
from .protections import take_out
from .tasks import VOCABULARY, what_is_wrong
from .trial import BROKER_TIMEOUT_S, MAX_LAG, Trial

SIZE = 64
_FILE, _AUTHOR = "model.safetensors", "author"


def token_logprobs(weights: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return logprobs that depend on the token and the weights alone."""
    return torch.log_softmax(weights, 0)[token_ids % SIZE]


class TinyBackend:
    """A backend in which the same batches in the same order give the same weights, bit for bit."""

    rank = replica = 0
    world_size = replicas = 1
    is_lead = True

    trails: ClassVar[Path]
    """The directory of the trails of this process's trial."""
    step_s: ClassVar[float]
    """The seconds of each step."""
    weights_name: ClassVar[str]
    """The name of the weights of this process's run."""
    is_of_agents: ClassVar[bool] = False
    """Whether agents play this run's samples."""

    def __init__(self, model: ModelConfig, optimizer: OptimizerConfig, **settings: object) -> None:
        self._weights = torch.linspace(-1.0, 1.0, SIZE)
        self._beginning = Beginning()
        self._author = uuid.uuid4().hex
        """The author's random name. Incarnations are not unique: a server that loses its last second repeats one."""

    @cached_property
    def trail(self) -> Trail:
        """Return the trail of this learner."""
        return Trail(self.trails, self._author, self._beginning)

    @property
    def digest(self) -> str:
        """Return the name of the weights as they are."""
        return hashlib.blake2b(self._weights.numpy().tobytes(), digest_size=8).hexdigest()

    def logprobs(self, batches: Sequence[PackedBatch], temperature: float) -> list[torch.Tensor]:
        return [_logprobs(self._weights, batch) for batch in batches]

    def step(
        self, batches: Sequence[PackedBatch], loss: TokenLoss, temperature: float, learning_rate: float
    ) -> tuple[float, float, list[dict[str, float]]]:
        time.sleep(self.step_s)
        weights = self._weights.clone().requires_grad_()
        total, reports = torch.zeros(()), []
        for index, batch in enumerate(batches):
            share, report = loss(index, _logprobs(weights, batch))
            total = total + share
            reports.append(report)
        (gradient,) = torch.autograd.grad(total, weights)
        self._weights -= learning_rate * gradient
        # Different batches always make different weights, even where the advantages cancel out.
        self._weights[sum(int(batch.token_ids_T.sum()) for batch in batches) % SIZE] += 1e-3
        return float(total.detach()), float(gradient.norm()), reports

    def follow(self, policy: Backend, decay: float) -> None:
        """Do nothing, because no trial has a reference."""
        raise NotImplementedError

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield self.weights_name, self._weights

    def snapshot(self, directory: Path, *, is_copied: bool) -> Snapshot:
        weights = {self.weights_name: self._weights.clone()}
        author = self.trail.author
        return Snapshot(
            (lambda: save_file(weights, directory / _FILE), lambda: (directory / _AUTHOR).write_text(author))
        )

    def save(self, directory: Path) -> None:
        save(self, directory)

    def off_device(self) -> AbstractContextManager[None]:
        return nullcontext()

    def load(self, directory: Path) -> None:
        self._weights = load_file(directory / _FILE)[self.weights_name]
        self._beginning = Beginning(author_of(directory), read_checkpoint(directory).state.step)


def author_of(checkpoint: Path) -> str:
    """Return the learner that saved the checkpoint."""
    return (checkpoint / _AUTHOR).read_text()


def _logprobs(weights: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """Return logprobs [T]."""
    return torch.where(batch.position_ids_T == 0, 0.0, token_logprobs(weights, batch.token_ids_T))


def run_learner(trial: Trial, url: str, incarnation: c_int64) -> None:
    """Run the process: code 0 once every prompt has been trained. `incarnation` becomes the one that it claims."""
    enter(trial.directory, "learner")
    take_out(trial.without)
    TinyBackend.trails, TinyBackend.weights_name = trial.trails, trial.weights_name
    TinyBackend.step_s, TinyBackend.is_of_agents = trial.step_s, bool(trial.agents)

    def claim_run(*arguments: Any, **named: Any) -> starting_point.RunClaim:
        claimed = starting_point.claim_run(*arguments, **named)
        incarnation.value = claimed.claim.owner.incarnation
        return claimed

    patch.object(training, "claim_run", claim_run).start()
    patch.object(training, "RunObserver", TrailObserver).start()
    patch.object(training, "_limits", _limits).start()
    patch.object(training, "BlockingBroker", partial(BlockingBroker, timeout_s=BROKER_TIMEOUT_S)).start()
    training.train(trial.recipe, url, resume=True)


def _limits(recipe: Recipe) -> SampleLimits:
    """Return limits for the engine's double, which has more tokens than the tokenizer."""
    return SampleLimits(vocabulary=VOCABULARY, max_new_tokens=recipe.sampling.max_new_tokens)


class TrailObserver(RunObserver):
    """An observer that also writes the learner's trail."""

    def on_weights(self, version: WeightVersion, backend: Backend, is_last: bool) -> None:
        assert isinstance(backend, TinyBackend)
        self._backend, self._digest = backend, backend.digest
        backend.trail.append(
            StepRecord(version, self._digest, ())
        )  # workers hold these weights, whether the step is trained or not
        super().on_weights(version, backend, is_last)

    def on_step(self, step: TrainedStep) -> None:
        pairs = [(group, trajectory) for group in step.groups for trajectory in group.trajectories]
        rollouts = rollouts_of(step.scored.sequences)
        trained = (_trained(*pair, rows) for pair, rows in zip(pairs, rollouts, strict=True))
        self._backend.trail.append(StepRecord(step.version, self._digest, tuple(trained)))
        super().on_step(step)


def _trained(group: Group, trajectory: Trajectory, rows: Sequence[PackableSequence]) -> Trained:
    over = sum(int(((row.lags > MAX_LAG) & (row.loss_mask != 0)).sum()) for row in rows)
    trained = partial(Trained, str(trajectory.tid), trajectory.spans, over, identity=trajectory.identity)
    if TinyBackend.is_of_agents:  # of whom no hostile worker sends any
        wrong = episodes.what_is_wrong_in(group.prompt, trajectory)
        return trained(wrong, turns=episodes.trained_turns(trajectory))
    return trained(what_is_wrong(group.prompt, trajectory), is_pill=is_pill(trajectory))
