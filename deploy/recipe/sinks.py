"""`metrics:` of a recipe: the sinks that come with Headway, what each can be told, and which package it needs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from broker.errors import ConfigError
from broker.installation import is_installed
from broker.user_code.kinds import unknown_kind
from broker.user_code.options import typed_options


class JsonlOptions(msgspec.Struct, frozen=True, kw_only=True):
    """There are none: where a run's record lies is known to all who read it."""


class TensorBoardOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where event files go."""

    directory: Annotated[
        str, Meta(description="event files go to directory/RUN, which several runs may share; empty: the run's own")
    ] = ""


@dataclass(frozen=True, kw_only=True)
class KnownSink:
    """What is known of a sink before it is made."""

    options: type[msgspec.Struct]
    package: str = ""
    """A module that not every installation has; empty: none."""
    remedy: str = ""
    """What to do where that is missing."""


SINKS = {
    "jsonl": KnownSink(options=JsonlOptions),
    "tensorboard": KnownSink(
        options=TensorBoardOptions, package="tensorboard", remedy="pip install 'headway[tensorboard]'."
    ),
}


class SinkConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One sink that the learner tells of every step, evaluation and look at the workers."""

    kind: Annotated[str, Meta(description=f"{', '.join(SINKS)}, or your own as package.module:Class")]
    options: Annotated[dict[str, Any], Meta(description="further arguments of the sink")] = {}


def check_sinks(configs: Sequence[SinkConfig], source: str) -> None:
    """Raise ConfigError for a kind or an option that there is not; one's own is asked once the learner makes it."""
    for index, config in enumerate(configs):
        if config.kind in SINKS:
            typed_options(config.options, SINKS[config.kind].options, f"{source}: metrics[{index}].options")
        elif ":" not in config.kind:
            raise unknown_kind(config.kind, SINKS, f"{source}: metrics[{index}].kind")


def check_sink_packages(configs: Sequence[SinkConfig]) -> None:
    """Raise ConfigError, with the remedy, where the package of a sink is missing."""
    for index, config in enumerate(configs):
        known = SINKS.get(config.kind)
        if known is not None and known.package and not is_installed(known.package):
            raise ConfigError(
                f"metrics[{index}].kind={config.kind} needs {known.package}, which is not installed. {known.remedy}"
            )
