"""The recipe: the configurations of all rooms in one struct, and those of launchers and metric sinks.

A value that two rooms share is written once here, and deploy passes it on. This module does not import torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headway.broker.config import BrokerConfig, StalenessConfig
from headway.broker.installation import check_extra
from headway.learner.algorithm_config import AlgorithmConfig
from headway.learner.config import (
    AdapterConfig,
    CheckpointConfig,
    LearnerConfig,
    ModelConfig,
    OptimizerConfig,
    PromptsConfig,
    SftConfig,
    SftPhaseConfig,
    StageConfig,
)
from headway.rollout_workers.config import (
    AgentConfig,
    EngineConfig,
    EnvironmentConfig,
    EvalConfig,
    RewardConfig,
    SamplingConfig,
    ScorersConfig,
    TeacherConfig,
    WorkersConfig,
)
from headway.weightsync.config import WeightsConfig


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The run's name, directory, seed and placement."""

    name: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z",
            description="names the run, its keys and directory: 1 to 100 letters, digits, dots, dashes, underscores",
            extra={"default": "the name of the recipe's file without .yaml, with a dash for what no name has"},
        ),
    ]
    directory: Annotated[
        str, Meta(min_length=1, description="parent of the run's directory: the run writes into directory/name")
    ] = "runs"
    seed: Annotated[int, Meta(ge=0, description="seed of prompts, sampling and initial weights")] = 0
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


LAUNCHERS = ("local", "ray")


class LauncherConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The way in which `headway run` starts the processes of its roles."""

    kind: Annotated[str, Meta(description=f"{', '.join(LAUNCHERS)}, or your own as package.module:Class")] = "local"
    options: Annotated[dict[str, Any], Meta(description="keyword arguments of the launcher")] = {}


LOOPBACK = "127.0.0.1"


class JsonlOptions(msgspec.Struct, frozen=True, kw_only=True):
    """There are no options: every reader knows where a run's record lies."""


class TensorBoardOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the TensorBoard sink."""

    directory: Annotated[
        str,
        Meta(description="parent of the event files' directory/RUN, which runs may share; empty: the run's directory"),
    ] = ""


class PrometheusOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the Prometheus sink."""

    host: Annotated[str, Meta(min_length=1, description="address on which the learner serves its metrics")] = LOOPBACK
    port: Annotated[int, Meta(ge=0, le=65535, description="its port; 0: any free one, which the learner logs")] = 9464


class WandbOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the Weights & Biases sink. Whatever is empty, wandb's own environment variables and settings say."""

    project: Annotated[str, Meta(min_length=1, description="project of the run")] = "headway"
    entity: Annotated[str, Meta(description="user or team that owns the project")] = ""
    mode: Annotated[
        Literal["", "online", "offline"],
        Meta(description="offline: files in the run's directory, which `wandb sync` uploads"),
    ] = ""


class MlflowOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the MLflow sink."""

    experiment: Annotated[str, Meta(min_length=1, description="experiment of the run; made if there is none")] = (
        "headway"
    )
    tracking_uri: Annotated[str, Meta(description="server or store; empty: MLFLOW_TRACKING_URI")] = ""


class TrackioOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the trackio sink."""

    project: Annotated[str, Meta(min_length=1, description="project of the run, below TRACKIO_DIR")] = "headway"
    space_id: Annotated[str, Meta(description="Space of Hugging Face that shows the run; empty: this machine only")] = (
        ""
    )


@dataclass(frozen=True, kw_only=True)
class SinkKind:
    """A sink's options and package, known before the sink is made."""

    options: type[msgspec.Struct]
    package: str = ""
    """The module of a package that not every installation has, and the extra of that name; empty: none."""


SINKS = {
    "jsonl": SinkKind(options=JsonlOptions),
    "tensorboard": SinkKind(options=TensorBoardOptions, package="tensorboard"),
    "prometheus": SinkKind(options=PrometheusOptions),
    "wandb": SinkKind(options=WandbOptions, package="wandb"),
    "mlflow": SinkKind(options=MlflowOptions, package="mlflow"),
    "trackio": SinkKind(options=TrackioOptions, package="trackio"),
}


class SinkConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One sink, to which the learner gives every step, evaluation and heartbeat."""

    kind: Annotated[str, Meta(description=f"{', '.join(SINKS)}, or your own as package.module:Class")]
    options: Annotated[dict[str, Any], Meta(description="options of that kind, or arguments of your own class")] = {}


def check_sink_packages(configs: Sequence[SinkConfig]) -> None:
    """Raise ConfigError, with the remedy, if the package of a sink is missing."""
    for index, config in enumerate(configs):
        known = SINKS.get(config.kind)
        if known is not None and known.package:
            check_extra(known.package, known.package, f"metrics[{index}].kind={config.kind}")


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole configuration of a run."""

    run: RunConfig
    prompts: PromptsConfig = PromptsConfig()
    rewards: Annotated[
        tuple[RewardConfig, ...], Meta(description="reward functions; their weighted sum is optimized")
    ] = ()
    environment: EnvironmentConfig = EnvironmentConfig()
    agent: AgentConfig = AgentConfig()
    teacher: TeacherConfig = TeacherConfig()
    scorers: ScorersConfig = ScorersConfig()
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
        Meta(description="stages in order; each starts from the model of an earlier one; none: sft, rl"),
    ] = ()
    checkpoint: CheckpointConfig = CheckpointConfig()
    weights: WeightsConfig = WeightsConfig()
    metrics: Annotated[tuple[SinkConfig, ...], Meta(description="sinks that get steps, evaluations and heartbeats")] = (
        SinkConfig(kind="jsonl"),
    )
    launcher: LauncherConfig = LauncherConfig()

    @property
    def plan(self) -> tuple[StageConfig, ...]:
        """The run's stages, in order."""
        return plan_of(self.sft, self.stages)

    @property
    def warm_up(self) -> tuple[SftPhaseConfig, ...]:
        """The phases of all supervised stages, in order."""
        return tuple(phase for stage in self.plan for phase in stage.phases)

    @property
    def has_prompts(self) -> bool:
        """Whether models can be measured on held-out prompts, or workers generate."""
        return bool(self.prompts.kind)

    @property
    def most_prompt_tokens(self) -> int:
        """The tokens of the longest prompt that leaves room for a response."""
        return self.engine.max_model_len - self.sampling.max_new_tokens

    @property
    def has_learner(self) -> bool:
        """Whether a stage is trained from what workers generate."""
        return any(stage.has_workers for stage in self.plan)

    def adapter_in(self, stage: StageConfig) -> AdapterConfig | None:
        """Return the adapter that a stage trains; None: the whole model. Models of scores are always trained whole."""
        adapter = self.model.adapter
        if adapter is None or stage.kind == "reward_model" or (adapter.stages and stage.name not in adapter.stages):
            return None
        return adapter

    @property
    def run_directory(self) -> Path:
        """The directory of this run's report, logs and checkpoints."""
        return Path(self.run.directory) / self.run.name


def plan_of(sft: SftConfig, stages: tuple[StageConfig, ...]) -> tuple[StageConfig, ...]:
    """Return the stages. A recipe that names none has supervised training by its `sft` section, and then `rl`."""
    return stages or (StageConfig(kind="sft", phases=sft.phases), StageConfig(kind="rl"))
