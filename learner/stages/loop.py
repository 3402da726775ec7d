"""The learner's loop: take -> pack -> proximal logprobs -> loss -> step -> publish -> commit.

All ranks run it together; rank 0 alone talks to the broker and the engines. Step k turns weights k into weights k + 1.
A resumed learner replays the batches that its checkpoint does not contain, and publishes nothing until it has caught up
with the highest step that was announced.

Metrics and traces of a step are made of the same laps of its phases. The probe holds logprobs of a fixed token sequence
under the weights to be published, by which engines check themselves. `RlStage` is the loop as a stage. `replay` trains
the batches of a run's log again, in the same order, without a broker or workers.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, assert_never

import numpy as np
import torch

from headway.broker.client.learner import TakenBatch
from headway.broker.errors import HeadwayError, UntrainableBatchError
from headway.broker.schema import Group, WeightVersion
from headway.broker.schema.weights import Probe
from headway.learner.backends.base import AdapterBackend, Backend
from headway.learner.batching.packing import PackableSequence, concatenate
from headway.learner.checkpoint import CheckpointError, CheckpointStore, LearnerState
from headway.learner.data.prompts.cursor import PromptCursor
from headway.learner.experience.broker_retries import StopRequested
from headway.learner.experience.log import ExperienceLog
from headway.learner.experience.log_files import share_groups
from headway.learner.experience.stream import Experience, WaitReason
from headway.learner.objective.update import ScoredBatch, Update, Updater
from headway.learner.ranks import Ranks

from .base import StageMetrics
from .device_lock import DeviceLock
from .stage_checkpoints import CheckpointWriter


class Lap(NamedTuple):
    """One stretch of a step in one phase; the laps of a step follow each other without gaps."""

    phase: str
    start_s: float
    """Seconds since the epoch."""
    end_s: float


class Stopwatch:
    """Measures one step, lap by lap. Its clock never goes back."""

    def __init__(self) -> None:
        self.laps: list[Lap] = []
        self._epoch_s = time.time() - time.perf_counter()
        self._last_s = self._now_s()

    def lap(self, phase: str) -> None:
        """The time since the last lap belongs to `phase`."""
        now_s = self._now_s()
        self.laps.append(Lap(phase, self._last_s, now_s))
        self._last_s = now_s

    def _now_s(self) -> float:
        return self._epoch_s + time.perf_counter()


def seconds_by_phase(laps: Iterable[Lap]) -> dict[str, float]:
    """Returns the seconds of each phase, over all its laps."""
    seconds: dict[str, float] = {}
    for lap in laps:
        seconds[lap.phase] = seconds.get(lap.phase, 0.0) + lap.end_s - lap.start_s
    return seconds


TOLERANCE = {"float32": 2e-3, "bfloat16": 0.25, "float16": 0.05}
"""Rounding of one forward pass in the engine's number format, as the mean of a logprob's absolute difference. A real
model of 30 layers has 0.07 in bfloat16; a wrong layout is off by whole units."""


def measure_probe(
    backend: Backend, token_ids: Sequence[int], tolerance: float, base_logprobs: Sequence[float] = ()
) -> Probe:
    """Returns the logprobs of `token_ids`, of which there are at least two. `base_logprobs`: those without the adapter,
    where the version carries one alone. Collective."""
    return Probe(
        token_ids=list(token_ids),
        logprobs=measure_logprobs(backend, token_ids),
        tolerance=tolerance,
        base_logprobs=list(base_logprobs),
    )


def measure_logprobs(backend: Backend, token_ids: Sequence[int]) -> list[float]:
    """Returns one logprob for each of the tokens after the first, at temperature 1. Collective."""
    assert len(token_ids) >= 2, "a probe needs a token to predict"
    response = len(token_ids) - 1
    sequence = PackableSequence(
        token_ids=np.asarray(token_ids, np.int32),
        prompt_length=1,
        loss_mask=np.ones(response, np.uint8),
        behavior_logprobs=np.zeros(response, np.float32),
        lags=np.zeros(response, np.int64),
        advantages=np.zeros(response, np.float32),
    )
    (logprobs_T,) = backend.logprobs([concatenate([sequence])], temperature=1.0)
    logprobs: list[float] = logprobs_T[1:].tolist()
    return logprobs


@dataclass(frozen=True, kw_only=True)
class TrainedStep:
    """One step that was trained, as observers are told of it."""

    version: WeightVersion
    """The version of the weights that the step turned into the next one."""
    groups: Sequence[Group]
    scored: ScoredBatch
    update: Update
    laps: Sequence[Lap]
    """The step's phases in order: checkpoint (of the steps before), evaluate, take, pack, train, publish."""


class Observer(Protocol):
    """The learner tells an observer what it does, on every rank."""

    def on_weights(self, version: WeightVersion, backend: Backend, is_last: bool) -> None:
        """These weights are about to be trained, or are the last. May call the backend, collectively."""
        ...

    def on_publish(self, version: WeightVersion) -> None:
        """This version is about to be published."""
        ...

    def on_step(self, step: TrainedStep) -> None:
        """A step is done and its weights are on their way."""
        ...


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """The settings of one training run."""

    steps: int
    checkpoint_every: int
    probe_tokens: tuple[int, ...]
    probe_tolerance: float
    identity: str = ""
    """The run's identity."""
    asynchronous: bool = True
    """True where training goes on while a checkpoint is written."""
    caught_up_at: int = 0
    """The highest step announced before this learner took over."""
    sends_adapter: bool = False
    """True where versions carry the adapter that the backend trains, alone (`AdapterBackend`)."""
    is_branch: bool = False
    """True where the learner goes on from another checkpoint than the latest; it then saves a new one at once."""


@dataclass(kw_only=True)
class Learner:
    """One rank of the learner. `experience` is None on all ranks but the first."""

    backend: Backend
    ranks: Ranks
    updater: Updater
    experience: Experience | None
    cursor: PromptCursor
    checkpoints: CheckpointStore
    config: LoopConfig
    observer: Observer
    should_stop: Callable[[], bool]
    version: WeightVersion
    device_lock: DeviceLock | None = None
    """The device that engines use while the learner waits for a batch; None where they have others."""

    def __post_init__(self) -> None:
        self.loss: float | None = None
        """The loss of the last step that this process trained; None before the first."""
        self._has_served_base = False
        self._base_probe_logprobs: list[float] = []
        self._caught_up_at = self.config.caught_up_at
        self._saved_step = -1 if self.config.is_branch else self.version.step
        self._writer = CheckpointWriter(self.checkpoints, self.ranks, asynchronous=self.config.asynchronous)

    def run(self) -> bool:
        """Train to the last step or the last prompt, or until asked to stop (False). At the end write a checkpoint,
        unless engines keep the device."""
        if self.config.is_branch:
            self.commit()
        if self.experience is not None:
            self.experience.feed()
        self.publish()
        while self.version.step < self.config.steps:
            watch = Stopwatch()
            if self.version.step % self.config.checkpoint_every == 0:
                self.checkpoint()
            self.commit_durable(self._writer.poll())
            watch.lap("checkpoint")
            self.observer.on_weights(self.version, self.backend, is_last=False)
            watch.lap("evaluate")
            try:
                groups = self.take()
            except (
                StopRequested
            ):  # engines keep the device; a resumed learner repeats steps that no checkpoint contains
                self.commit_durable(self._writer.wait())
                return False
            watch.lap("take")
            if not groups:
                break
            self.train(groups, watch)
        self.commit()
        if self.ranks.any(self.should_stop()):
            return False
        self.observer.on_weights(self.version, self.backend, is_last=True)
        return True

    def train(self, groups: Sequence[Group], watch: Stopwatch) -> None:
        """Trains one step, from its batch to published weights."""
        before = self.version
        try:
            scored = self.updater.compute_advantages(groups, before.step)
            batches = self.updater.pack(scored.sequences)
            watch.lap("pack")
            update = self.updater.update(batches, before.step, is_of_this_learner=_is_of(before, groups))
        except HeadwayError:
            raise
        except Exception as error:
            raise UntrainableBatchError(self._failure_advice(error)) from error
        self.loss = update.loss
        self.version = WeightVersion(before.incarnation, before.step + 1)
        self.cursor.mark_trained(group.prompt.group for group in groups)
        watch.lap("train")
        self.publish()
        watch.lap("publish")
        # Before the checkpoint: a crash between the two then repeats a line, which readers of the record drop.
        self.observer.on_step(TrainedStep(version=before, groups=groups, scored=scored, update=update, laps=watch.laps))

    def _failure_advice(self, error: Exception) -> str:
        """Returns how to go on after a step that failed; its batch stays pinned, so a resumed learner repeats it."""
        reason, saved = str(error).strip().split("\n")[0], self.checkpoints.latest()
        anew = f"--resume --rewind-to {saved.state.step} --regenerate" if saved else "--overwrite"
        loses = f"all that was sampled since the checkpoint of step {saved.state.step}" if saved else "the run"
        return (
            f"Step {self.version.step + 1} failed while it was trained ({type(error).__name__}: {reason}). A memory or"
            " device that gave way may do after a plain --resume, which trains the same batch again. If that fails as"
            f" well, go on without the batch: {anew} forgets {loses}, and generates it anew."
        )

    def take(self) -> list[Group]:
        """Returns this step's batch on every rank; it is empty where nothing will come or the learner was asked to
        stop.

        Raises StopRequested where it was, and engines may keep the device.
        """
        while True:
            answer = self._wait(may_wait=self.device_lock is None)
            if answer is WaitReason.FOR_DEVICE and self.device_lock is not None:
                with self.device_lock.released():
                    answer = self._wait(may_wait=True)
            match answer:
                case TakenBatch():
                    return share_groups(self.ranks, answer.groups)
                case WaitReason.FOR_WEIGHTS:
                    self._caught_up_at = 0
                    self.publish()
                case WaitReason.FOR_COMMIT:
                    self.commit()
                case WaitReason.FOR_RANKS | WaitReason.FOR_DEVICE:
                    raise AssertionError(f"Wait.{answer.name} was answered before")
                case _:
                    assert_never(answer)

    def _wait(self, *, may_wait: bool) -> TakenBatch | WaitReason:
        """Returns rank 0's answer on every rank; only rank 0's has groups. It needs no model on the device."""
        while True:
            answer = self._take(may_wait)
            wait = self.ranks.share_bytes(answer.encode() if isinstance(answer, WaitReason) else b"").decode()
            if not wait:
                return answer
            if wait != WaitReason.FOR_RANKS:
                return WaitReason(wait)
            self.commit_durable(self._writer.poll())

    def _take(self, may_wait: bool) -> TakenBatch | WaitReason:
        nothing = TakenBatch(self.version.step, ())
        if self.experience is None or self.should_stop():
            return nothing
        meanwhile = None if self.device_lock is None else self.device_lock.renew
        try:
            return self.experience.take(self.version.step, meanwhile, may_wait=may_wait)
        except StopRequested:
            return nothing

    def publish(self) -> None:
        """Sends the weights to the engines beside the next step, unless the learner still replays earlier steps."""
        if self.version.step < self._caught_up_at:
            return
        self.observer.on_publish(self.version)
        base = self._base_logprobs() if self.config.sends_adapter else ()
        probe = measure_probe(self.backend, self.config.probe_tokens, self.config.probe_tolerance, base)
        tensors = self._tensors()
        try:
            if self.experience is not None:
                self.experience.publish(self.version, tensors, probe)
        finally:
            for _ in tensors:  # gathering is collective
                pass

    def _base_logprobs(self) -> list[float]:
        """Returns the probe's logprobs without the adapter, which never change, so they are measured once."""
        assert isinstance(self.backend, AdapterBackend)
        if not self._base_probe_logprobs:
            with self.backend.without_adapter():
                self._base_probe_logprobs = measure_logprobs(self.backend, self.config.probe_tokens)
        return self._base_probe_logprobs

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Returns what a version carries. The base of adapters is published once, before the first of them."""
        if not self.config.sends_adapter:
            return self.backend.named_tensors()
        assert isinstance(self.backend, AdapterBackend)
        if not self._has_served_base:
            base = self.backend.base_tensors()
            if self.experience is not None:
                self.experience.serve_base(base, self.backend.adapter_scale)
            for _ in base:  # gathering is collective
                pass
            self._has_served_base = True
        return self.backend.factor_tensors()

    def commit(self) -> None:
        """Makes the state durable, then lets the broker forget the batches that it contains."""
        self.checkpoint()
        self.commit_durable(self._writer.wait())

    def checkpoint(self) -> None:
        """Begins to write the state, once the checkpoint before is durable and the weights are announced."""
        if self.experience is not None:
            self.experience.settle()
        if self.version.step == self._saved_step:
            return
        self.commit_durable(self._writer.wait())
        if self.experience is not None:
            self.experience.mark_dropped()
        state = LearnerState(
            identity=self.config.identity,
            incarnation=self.version.incarnation,
            step=self.version.step,
            cursor=self.cursor.state(),
        )
        self._writer.begin({"": self.backend, **self.updater.extra_models}, state)
        self._saved_step = self.version.step

    def commit_durable(self, step: int | None) -> None:
        """Lets the broker forget the batches of the steps before `step`, which a durable checkpoint contains."""
        if step is not None and self.experience is not None:
            self.experience.commit(step)


class RlStage:
    """One rank of the learner's loop. `starting_point.py` decides where it begins, before it is opened."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    @property
    def metrics(self) -> StageMetrics:
        """Steps of the whole run; the loss of the last step that this process trained."""
        return StageMetrics(steps=self._learner.version.step, loss=self._learner.loss)

    def run(self) -> bool:
        """Trains to the last step or the last prompt; False if stopped before. See `Learner.run`."""
        return self._learner.run()

    def save(self) -> Path:
        """Returns the checkpoint that `run` ended with. Raises CheckpointError where it was removed."""
        latest = self._learner.checkpoints.latest()
        if latest is None:
            raise CheckpointError("The run has ended, and its checkpoints are gone.")
        return latest.path


def _is_of(version: WeightVersion, groups: Sequence[Group]) -> bool:
    """Returns whether all tokens of the version's step were sampled by the weights of its own incarnation."""
    spans = (span for group in groups for trajectory in group.trajectories for span in trajectory.spans)
    return all(span.version == version for span in spans if span.version.step == version.step)


class ReplayError(HeadwayError):
    """The run cannot be replayed as asked; the message says which steps can be."""


def replay(updater: Updater, experience_log: ExperienceLog, steps: range) -> Iterator[TrainedStep]:
    """Trains these steps and yields each; the backend then holds the weights that the step led to.

    With the run's settings, rank count and first weights the results are the same, bit for bit. Raises ReplayError.
    """
    for step in steps:
        watch = Stopwatch()
        groups = experience_log.read(step)
        if groups is None:
            raise ReplayError(
                f"The experience log does not hold step {step}; it can be replayed up to there (--steps)."
            )
        watch.lap("take")
        scored = updater.compute_advantages(groups, step)
        batches = updater.pack(scored.sequences)
        watch.lap("pack")
        # The run's own learner has compared its engine's tokens; a replay with other settings has other weights.
        update = updater.update(batches, step, is_of_this_learner=False)
        watch.lap("train")
        for phase in ("publish", "checkpoint"):
            watch.lap(phase)
        version = WeightVersion(0, step)
        yield TrainedStep(version=version, groups=groups, scored=scored, update=update, laps=watch.laps)


def weights_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Returns a digest of names, types, shapes and bytes; the order of the tensors does not matter."""
    parts = sorted(f"{name} {_tensor_digest(tensor)}" for name, tensor in tensors)
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def saved_tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of the model in `directory`, one at a time."""
    from safetensors import safe_open

    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                yield name, tensors.get_tensor(name)


def _tensor_digest(tensor: torch.Tensor) -> str:
    digest = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)} ".encode(), digest_size=16)
    digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
