"""Every stage as a new process opens it, on either backend, and the files of a disturbed and an undisturbed run."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Protocol, cast

import msgspec
import numpy as np
import torch
from msgspec.structs import replace

from headway.algorithms.presets import PRESETS
from headway.broker.client.learner import TakenBatch
from headway.broker.schema import Group, WeightVersion
from headway.learner.algorithm_config import AlgorithmConfig
from headway.learner.backends import open_backend
from headway.learner.backends.base import Backend
from headway.learner.checkpoint import CheckpointStore
from headway.learner.config import RecordsConfig, SftPhaseConfig, StageConfig
from headway.learner.data.prompts.cursor import PromptCursor
from headway.learner.experience.stream import Experience
from headway.learner.objective.composition import needs_critic, needs_reference
from headway.learner.objective.critic import Critic
from headway.learner.objective.update import Updater
from headway.learner.ranks import Ranks
from headway.learner.stages import open_stage
from headway.learner.stages.base import Progress, Stage
from headway.learner.stages.loop import Learner, LoopConfig, RlStage, TrainedStep, weights_digest
from headway.learner.stages.registry import DpoOptions
from headway.learner.stages.starting_point import choose_origin
from tests.learner import distilling
from tests.learner.batches import group
from tests.learner.preferences import opened, opened_kto, opened_scores, opened_sft, parts_of
from tests.learner.tiny import OPTIMIZER, model_config
from tests.learner.updaters import open_updater

STEPS = 4
MODEL = model_config("qwen3")
SHARED: dict[str, Any] = {"batch_size": 3, "max_steps": STEPS, "epochs": STEPS, "evaluate_every_steps": 2}


class Killed(BaseException):
    """Stands for the process's sudden end, which no code of the stage may handle."""


@dataclass
class Watcher:
    """Counts the steps that one opening of a stage trained, and ends it after so many."""

    kill_at: int = 99
    stop_at: int = 99
    losses: list[float] = field(default_factory=list)

    def saw(self, loss: float) -> None:
        self.losses.append(loss)
        if len(self.losses) == self.kill_at:
            raise Killed

    def should_stop(self) -> bool:
        return len(self.losses) >= self.stop_at

    def watches(self, backend_kind: str) -> dict[str, Any]:
        """Return the settings for `preferences.parts_of`."""
        return {
            "every_s": 0.0,
            "backend_kind": backend_kind,
            "report": lambda progress: self.saw(cast(Progress, progress).loss),
            "should_stop": self.should_stop,
        }


class Open(Protocol):
    """Open the stage as a new process does: with fresh weights, and no knowledge but the files in `directory`."""

    def __call__(self, directory: Path, watcher: Watcher, backend_kind: str = "fsdp") -> tuple[Stage, Backend]: ...


def open_phases(directory: Path, watcher: Watcher, backend_kind: str = "fsdp") -> tuple[Stage, Backend]:
    phase = SftPhaseConfig(kind="arithmetic", batch_size=3, max_steps=STEPS // 2, learning_rate=1e-2)
    parts = parts_of(directory, **watcher.watches(backend_kind))
    return open_stage(StageConfig(kind="sft", phases=(phase, phase)), parts, "stages[0]"), parts.backend


def open_sft(directory: Path, watcher: Watcher, backend_kind: str = "fsdp") -> tuple[Stage, Backend]:
    return opened_sft(directory, options=SHARED, **watcher.watches(backend_kind))


def open_dpo(directory: Path, watcher: Watcher, backend_kind: str = "fsdp") -> tuple[Stage, Backend]:
    options = DpoOptions(data=RecordsConfig(), learning_rate=1e-2, **SHARED)
    return opened(directory, options, **watcher.watches(backend_kind))


def open_kto(directory: Path, watcher: Watcher, backend_kind: str = "fsdp") -> tuple[Stage, Backend]:
    return opened_kto(directory, options=SHARED, **watcher.watches(backend_kind))


def open_reward_model(directory: Path, watcher: Watcher, backend_kind: str = "fsdp") -> tuple[Stage, Backend]:
    return opened_scores(directory, options=SHARED, **watcher.watches(backend_kind))


def open_distill(directory: Path, watcher: Watcher, backend_kind: str = "fsdp") -> tuple[Stage, Backend]:
    return distilling.opened(directory, replace(distilling.OPTIONS, **SHARED), **watcher.watches(backend_kind))


def open_rl(
    directory: Path, watcher: Watcher, backend_kind: str = "fsdp", *, preset: str = "grpo", **changed: Any
) -> tuple[Stage, Backend]:
    """Open the stage with the batches that a broker would return, and with no engine to publish to."""
    algorithm = msgspec.convert(PRESETS[preset].algorithm | changed, AlgorithmConfig)
    backend = open_backend(backend_kind, MODEL, OPTIMIZER, seed=3)
    ranks, updater = Ranks.of(backend), updater_of(backend, algorithm, backend_kind)
    checkpoints = CheckpointStore(directory / "checkpoints", keep=2)
    origin = choose_origin(checkpoints, updater_and_model(backend, updater), ranks, resume=True, rewind=None)

    def on_step(step: TrainedStep) -> None:
        watcher.saw(step.update.loss)

    learner = Learner(
        backend=backend,
        ranks=ranks,
        updater=updater,
        experience=cast(Experience, Batches()),
        cursor=cast(PromptCursor, SimpleNamespace(state=dict, mark_trained=list)),
        checkpoints=checkpoints,
        config=LoopConfig(
            steps=STEPS, checkpoint_every=2, probe_tokens=(1, 2), probe_tolerance=1.0, asynchronous=False
        ),
        observer=SimpleNamespace(on_weights=lambda *_, **__: None, on_publish=lambda _: None, on_step=on_step),
        should_stop=watcher.should_stop,
        version=WeightVersion(1, origin.step),
    )
    return RlStage(learner), backend


class Batches:
    """The same batches at every request: two groups in each step, the second trimmed, one version old."""

    def take(self, step: int, *_: object, **__: object) -> TakenBatch:
        version = max(0, step - 1)
        return TakenBatch(
            step, (taught(group(2 * step, step=version)), taught(group(2 * step + 1, (0, 2), step=version)))
        )

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def taught(group: Group) -> Group:
    """Add the logprobs that a teacher gives."""
    with_teacher = tuple(
        replace(one, teacher_logprobs=np.linspace(-2, 0, len(one.response_tokens), dtype=np.float32))
        for one in group.trajectories
    )
    return replace(group, trajectories=with_teacher)


def updater_of(backend: Backend, algorithm: AlgorithmConfig, backend_kind: str) -> Updater:
    ranks = Ranks.of(backend)
    reference = open_backend(backend_kind, MODEL, OPTIMIZER, seed=3) if needs_reference(algorithm) else None
    critic = None
    if needs_critic(algorithm):
        values = open_backend(backend_kind, MODEL, OPTIMIZER, seed=3, head="value")
        critic = Critic(values, ranks, clip=0.2, gamma=0.99, lam=0.95, learning_rate=1e-2)
    learner = {"micro_batch_tokens": 64, "steps": STEPS}
    optimizer = replace(OPTIMIZER, learning_rate=1e-2, schedule="cosine")
    return open_updater(algorithm, backend, reference, critic, learner=learner, optimizer=optimizer)


def updater_and_model(backend: Backend, updater: Updater) -> Callable[[Path], None]:
    def load(path: Path) -> None:
        backend.load(path)
        updater.load(path)

    return load


OPEN: dict[str, Open] = {
    "sft phases": open_phases,
    "sft": open_sft,
    "dpo": open_dpo,
    "kto": open_kto,
    "reward_model": open_reward_model,
    "distill": open_distill,
    "rl": open_rl,
    "rl online_dpo": partial(open_rl, preset="online_dpo", kl={"ema_decay": 0.9}),
    "rl distillation": partial(open_rl, preset="distillation"),
    "rl ppo": partial(open_rl, preset="ppo", kl={"coefficient": 0.05, "place": "reward", "kind": "k1"}),
}


class Left(msgspec.Struct, kw_only=True):
    """The files and figures that a stage leaves at its end."""

    losses: list[float]
    """The losses of the steps that its last opening trained."""
    metrics: dict[str, Any]
    weights: str
    files: dict[str, str]
    """A digest of each file: weights, moments, generators, and the models beside the policy."""


Disturbance = Literal["undisturbed", "killed", "stopped"]
DATED = ("files.json", "digests.json", ".metadata")
"""Files that hold a time, or the digest of such a file."""


def left(open_one: Open, directory: Path, backend_kind: str, disturbance: Disturbance) -> Left:
    """Run the stage to its end, disturbed in its third step or not."""
    torch.manual_seed(0)
    if disturbance != "undisturbed":
        first = Watcher(kill_at=3) if disturbance == "killed" else Watcher(stop_at=3)
        stage, _ = open_one(directory, first, backend_kind)
        try:
            assert not stage.run(), "it was stopped"
        except Killed:
            assert disturbance == "killed"
        torch.manual_seed(1)  # a new process has other generators
    last = Watcher()
    stage, backend = open_one(directory, last, backend_kind)
    assert stage.run()
    return Left(
        losses=last.losses,
        metrics=msgspec.to_builtins(stage.metrics),
        weights=weights_digest(backend.named_tensors()),
        files=files_of(stage.save()),
    )


def files_of(directory: Path) -> dict[str, str]:
    files = [path for path in sorted(directory.rglob("*")) if path.is_file() and path.name not in DATED]
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
