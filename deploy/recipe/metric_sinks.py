"""`metrics:` of a recipe: the sinks that come with Headway, their options and the packages that they need."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headway.broker.installation import check_extra
from headway.broker.user_code.kinds import typed_options, unknown_kind

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


def check_sinks(configs: Sequence[SinkConfig], source: str) -> None:
    """Raise ConfigError for an unknown kind or option. The learner checks a user's own sink when it makes it."""
    for index, config in enumerate(configs):
        if config.kind in SINKS:
            typed_options(config.options, SINKS[config.kind].options, f"{source}: metrics[{index}].options")
        elif ":" not in config.kind:
            raise unknown_kind(config.kind, SINKS, f"{source}: metrics[{index}].kind")


def check_sink_packages(configs: Sequence[SinkConfig]) -> None:
    """Raise ConfigError, with the remedy, if the package of a sink is missing."""
    for index, config in enumerate(configs):
        known = SINKS.get(config.kind)
        if known is not None and known.package:
            check_extra(known.package, known.package, f"metrics[{index}].kind={config.kind}")
