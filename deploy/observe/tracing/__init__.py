"""OpenTelemetry spans of what a run does, sent over OTLP to a collector that the process's environment names.

    worker ──►  trajectory ─┬─ turn ─┬─ generate        trace id and span id of the root are a hash of
                            │        └─ score           the run's identity and the trajectory's id
                            └─ turn ...
    learner ─►  step ─┬─ checkpoint, evaluate, take, pack, train, publish
                      └ links ──► the trajectories that it trained

No id travels with the data, so every worker that holds a sample's lease adds to the same trace, and the learner links
to it. `spans.py` makes the ids, opens and closes the exporter, and follows a worker's samples and a learner's steps.

The invariant: where the environment names no collector, this room imports nothing of OpenTelemetry. A collector that is
away neither delays nor ends a run, and no trace changes what is trained.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headway.broker.installation import is_installed, pip_install

if TYPE_CHECKING:
    from headway.rollout_workers.samples.episode import SampleTracer

    from .spans import Spans, StepTraces

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp")
log = logging.getLogger(__name__)


@contextmanager
def open_sample_traces(run: str, worker: str) -> Iterator["SampleTracer"]:
    """Yield what traces the samples of this worker's process; it does nothing where the environment wants no traces."""
    from headway.rollout_workers.samples.episode import NO_TRACER

    with _open_spans("headway-worker", {"headway.run": run, "service.instance.id": worker}) as spans:
        if spans is None:
            yield NO_TRACER
            return
        from .spans import SampleTraces

        yield SampleTraces(spans)


@contextmanager
def open_step_traces(run: str, identity: str) -> Iterator["StepTraces | None"]:
    """Yield what traces the steps of this learner's process; None where the environment wants no traces. `identity` is
    the run's."""
    with _open_spans("headway-learner", {"headway.run": run}) as spans:
        if spans is None:
            yield None
            return
        from .spans import StepTraces

        yield StepTraces(spans, identity)


@contextmanager
def _open_spans(service: str, attributes: Mapping[str, str]) -> Iterator["Spans | None"]:
    """Yield what starts this process's spans; None where the environment wants none. At the end the spans that are
    left are sent, for a few seconds at most.

    `service` is the service's name unless the environment says another, and `attributes` describe the process.
    """
    endpoint = wanted_endpoint(os.environ)
    if not endpoint:
        yield None
        return
    if not all(is_installed(package) for package in PACKAGES):
        log.warning("No traces are sent to %s: opentelemetry is not installed. %s.", endpoint, pip_install("otel"))
        yield None
        return
    from .spans import close_provider, make_provider, make_spans

    provider = make_provider(service, attributes, endpoint=endpoint, protocol=_first(os.environ, PROTOCOLS))
    if provider is None:
        yield None
        return
    log.info("traces go to %s", endpoint)
    try:
        yield make_spans(provider)
    finally:
        close_provider(provider)


def wanted_endpoint(environment: Mapping[str, str]) -> str:
    """Return where the standard variables of OpenTelemetry want traces to go; empty for nowhere."""
    is_off = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    exporters = (environment.get("OTEL_TRACES_EXPORTER") or "otlp").split(",")
    if is_off or "otlp" not in [exporter.strip() for exporter in exporters]:
        return ""
    return _first(environment, ENDPOINTS)


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> str:
    """Return the first of these variables that is set and not empty, or an empty string."""
    return next(filter(None, (environment.get(name, "").strip() for name in names)), "")
