"""The recipe: every room's own configuration under one roof.

A value that two rooms share is written once here and passed on by deploy. Nothing here imports torch.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from broker.config import BrokerConfig, StalenessConfig
from learner.config import (
    AlgorithmConfig,
    CheckpointConfig,
    LearnerConfig,
    ModelConfig,
    OptimizerConfig,
    PromptsConfig,
    SftConfig,
    StageConfig,
)
from rollout_workers.config import (
    EngineConfig,
    EnvironmentConfig,
    EvalConfig,
    RewardConfig,
    SamplingConfig,
    WorkersConfig,
)
from weightsync.config import WeightsConfig

from .sinks import SinkConfig


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the run is called and where its report goes."""

    name: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z",
            description="names the run, its keys and directory: 1 to 100 letters, digits, dots, dashes, underscores",
        ),
    ]
    directory: Annotated[str, Meta(min_length=1, description="the run writes into directory/name")] = "runs"
    seed: Annotated[int, Meta(ge=0, description="of prompts, sampling and initial weights")] = 0
    placement: Annotated[
        Literal["separated", "colocated"],
        Meta(
            description="separated: learner and engines work at the same time; colocated: they have the same devices in"
            " turns, each with nearly all of the memory"
        ),
    ] = "separated"

    @property
    def is_colocated(self) -> bool:
        return self.placement == "colocated"


LAUNCHERS = ("local",)


class LauncherConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How `headway run` starts the processes of its roles."""

    kind: Annotated[str, Meta(description=f"{', '.join(LAUNCHERS)}, or your own as package.module:Class")] = "local"
    options: Annotated[dict[str, Any], Meta(description="keyword arguments of your own launcher")] = {}


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a run can be told."""

    run: RunConfig
    prompts: PromptsConfig
    rewards: Annotated[
        tuple[RewardConfig, ...],
        Meta(min_length=1, description="reward functions; their weighted sum is optimized"),
    ]
    environment: EnvironmentConfig = EnvironmentConfig()
    model: ModelConfig = ModelConfig()
    broker: BrokerConfig = BrokerConfig()
    staleness: StalenessConfig = StalenessConfig()
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    workers: WorkersConfig = WorkersConfig()
    evaluation: EvalConfig = EvalConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    learner: LearnerConfig = LearnerConfig()
    sft: SftConfig = SftConfig()
    stages: Annotated[
        tuple[StageConfig, ...],
        Meta(description="what trains the model, in order: each starts from what the one before left; none: sft, rl"),
    ] = ()
    checkpoint: CheckpointConfig = CheckpointConfig()
    weights: WeightsConfig = WeightsConfig()
    metrics: Annotated[
        tuple[SinkConfig, ...], Meta(description="where steps, evaluations and looks at the workers are written")
    ] = (SinkConfig(kind="jsonl"),)
    launcher: LauncherConfig = LauncherConfig()

    @property
    def plan(self) -> tuple[StageConfig, ...]:
        """The run's stages, in order."""
        return plan_of(self.sft, self.stages)

    @property
    def has_learner(self) -> bool:
        """Whether one of its stages is trained from what workers generate."""
        return any(stage.has_workers for stage in self.plan)

    @property
    def run_directory(self) -> Path:
        """Where this run's report, logs and checkpoints are."""
        return Path(self.run.directory) / self.run.name


def plan_of(sft: SftConfig, stages: tuple[StageConfig, ...]) -> tuple[StageConfig, ...]:
    """A recipe that names no stages has supervised training as its `sft` section says, and then `rl`."""
    return stages or (StageConfig(kind="sft", phases=sft.phases), StageConfig(kind="rl"))
