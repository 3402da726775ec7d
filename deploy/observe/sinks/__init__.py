"""Sends a run's metrics to any number of sinks, as typed events: a step, an evaluation, a heartbeat.

    learner ─ event ─► Sinks ─┬─ jsonl        the run's record, written before the learner goes on
                              └─ queue ─► tensorboard, prometheus, wandb, mlflow, trackio, or your
                                          own, in a thread of its own

The events are in `deploy.run.events`, and a sink is a `base.MetricSink`. The invariant: the run's record is written
whole, or the learner ends. Training goes on whatever another sink does, and the events that it loses are counted.

Your own sink is `package.module:Class`, which the learner calls as Class(**options), because the learner's operator
gave it the recipe. Workers have theirs from the broker, and import no sinks.
"""

from collections.abc import Sequence

from headway.broker.user_code.import_paths import in_one_paragraph, load_custom
from headway.broker.user_code.kinds import typed_options, unknown_kind
from headway.deploy.recipe.recipe import (
    SINKS,
    JsonlOptions,
    MlflowOptions,
    PrometheusOptions,
    SinkConfig,
    TensorBoardOptions,
    TrackioOptions,
    WandbOptions,
    check_sink_packages,
)

from .base import MetricSink, SinkRun, Sinks


def open_sinks(configs: Sequence[SinkConfig], run: SinkRun) -> Sinks:
    """Open the recipe's sinks for the events of `run`. Raises ConfigError for a sink that does not exist or cannot be
    made, HeadwayError if the run's record cannot be opened."""
    check_sink_packages(configs)
    names = [f"metrics[{index}] ({config.kind})" for index, config in enumerate(configs)]
    made = [make_sink(config, f"metrics[{index}]") for index, config in enumerate(configs)]
    return Sinks(dict(zip(names, made, strict=True)), run)


def make_sink(config: SinkConfig, where: str) -> MetricSink:
    """Make one sink without opening it; `where` is its key. Raises ConfigError."""
    match config.kind:
        case "jsonl":
            from .jsonl import JsonlSink

            typed_options(config.options, JsonlOptions, f"{where}.options")
            return JsonlSink()
        case "tensorboard":
            from .trackers import TensorBoardSink

            return TensorBoardSink(typed_options(config.options, TensorBoardOptions, f"{where}.options"))
        case "prometheus":
            from .prometheus import PrometheusSink

            return PrometheusSink(typed_options(config.options, PrometheusOptions, f"{where}.options"), where)
        case "wandb":
            from .trackers import WandbSink

            return WandbSink(typed_options(config.options, WandbOptions, f"{where}.options"))
        case "mlflow":
            from .trackers import MlflowSink

            return MlflowSink(typed_options(config.options, MlflowOptions, f"{where}.options"))
        case "trackio":
            from .trackers import TrackioSink

            return TrackioSink(typed_options(config.options, TrackioOptions, f"{where}.options"))
        case own if ":" in own:
            return _own(config, where)
        case unknown:
            raise unknown_kind(unknown, SINKS, f"{where}.kind")


def _own(config: SinkConfig, where: str) -> MetricSink:
    with in_one_paragraph(config.kind, where):
        sink: MetricSink = load_custom(config.kind, MetricSink, f"{where}.kind", lambda own: own(**config.options))
    return sink
