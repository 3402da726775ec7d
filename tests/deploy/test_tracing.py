"""Spans without a run: the conditions for making any, their ids, the sampler, and a collector that is away."""

import logging
import random
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from headway.broker.client.submissions import SubmitOutcome
from headway.broker.schema import Lease, Prompt, TrajectoryId, WeightVersion
from headway.deploy.observe import tracing
from headway.deploy.observe.tracing import open_sample_traces, open_step_traces, wanted_endpoint
from headway.learner.stages.loop import Lap, Stopwatch, seconds_by_phase
from headway.rollout_workers.engines.base import Chunk
from headway.rollout_workers.samples.episode import NO_TRACER, SampleTracer
from headway.rollout_workers.samples.recorder import Recorder
from tests.collector import Collector, collecting

IDENTITY = "0123456789abcdef"
PHASES = ("checkpoint", "evaluate", "take", "pack", "train", "publish")
OFF = """
import sys
from headway.deploy.observe.tracing import open_sample_traces, open_step_traces
from headway.rollout_workers.samples.episode import NO_TRACER
with open_sample_traces("run", "w") as samples, open_step_traces("run", "id") as steps:
    assert (samples, steps) == (NO_TRACER, None)
assert "headway.deploy.observe.tracing.spans" not in sys.modules
assert not [name for name in sys.modules if name.startswith("opentelemetry.exporter")]
"""


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_SERVICE_NAME", "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environment", "endpoint"),
    [
        ({}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a"}, "http://a"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://b"}, "http://b"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_SDK_DISABLED": "True"}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_TRACES_EXPORTER": "none"}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_TRACES_EXPORTER": "console, otlp"}, "http://a"),
    ],
)
def test_the_standard_variables_say_whether_there_are_traces(environment: dict[str, str], endpoint: str) -> None:
    assert wanted_endpoint(environment) == endpoint


def test_without_an_endpoint_no_exporter_is_imported() -> None:
    subprocess.run([sys.executable, "-c", OFF], check=True)


@pytest.mark.parametrize(
    ("variables", "installed", "said"),
    [
        ({}, False, "pip install 'headway[otel]'"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, True, "the protocol 'http/json' is neither"),
    ],
)
def test_what_cannot_send_traces_says_so_and_works(
    variables: dict[str, str],
    installed: bool,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, value in {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tracing, "is_installed", lambda module: installed)
    with open_sample_traces("run", "w") as samples:
        assert samples is NO_TRACER
    assert said in caplog.text


def test_a_step_links_to_every_trajectory_and_draws_no_random_number(monkeypatch: pytest.MonkeyPatch) -> None:
    tids = [TrajectoryId("0000-00000001", 0, sample) for sample in range(300)]
    with collecting() as collector:
        send_to(collector, monkeypatch)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
        before = random.getstate()
        with open_step_traces("run", IDENTITY) as steps, open_sample_traces("run", "w") as samples:
            assert steps is not None
            steps.add(trained(3, tids))
            for tid in tids:
                play(samples, tid)
        assert random.getstate() == before
    (step,) = collector.named("step")
    assert collector.paths == {"/v1/traces"}
    assert step.resource["service.name"] == "mine"
    assert step.attributes == {"headway.step": 3, "headway.incarnation": 1, "headway.trajectories": 300}
    assert [(span.name, span.start_ns, span.end_ns) for span in collector.below(step)] == [
        (phase, (100 + number) * 10**9, (101 + number) * 10**9) for number, phase in enumerate(PHASES)
    ]
    roots = {(root.trace, root.span, root.attributes["headway.trajectory"]) for root in collector.named("trajectory")}
    assert {tuple(link) for link in step.links} == roots
    assert len(roots) == 300


def test_a_trajectory_has_turns_below_which_it_is_generated_and_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    tid = TrajectoryId("0000-00000001", 0, 0)
    with collecting() as collector:
        send_to(collector, monkeypatch)
        with open_sample_traces("run", "w") as samples:
            play(samples, tid, turns=2)
    (root,) = collector.named("trajectory")
    turns = collector.below(root)
    assert [(turn.name, turn.attributes["headway.turn"]) for turn in turns] == [("turn", 0), ("turn", 1)]
    for turn in turns:
        generate, score = collector.below(turn)
        assert (generate.name, generate.attributes["headway.tokens"], score.name) == ("generate", 2, "score")
    assert root.attributes["headway.response_tokens"] == 5
    assert root.attributes["headway.reward"] == 0.75
    assert (root.resource["headway.run"], root.resource["service.instance.id"]) == ("run", "w")
    assert root.resource["service.name"] == "headway-worker"


def test_the_root_is_sent_by_the_worker_whose_submission_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    tid = TrajectoryId("0000-00000001", 0, 0)
    with collecting() as collector:
        send_to(collector, monkeypatch)
        with open_sample_traces("run", "late") as late, open_sample_traces("run", "first") as first:
            play(first, tid)
            play(late, tid, outcome=SubmitOutcome.FENCED)
            with pytest.raises(RuntimeError), late.sample(lease_of(tid), Recorder()) as trace, trace.generating():
                raise RuntimeError("the engine is gone")
    (root,) = collector.named("trajectory")
    assert root.resource["service.instance.id"] == "first"
    turns = collector.below(root)
    assert sorted(str(turn.resource["service.instance.id"]) for turn in turns) == ["first", "late", "late"]
    assert {span.trace for span in collector.spans} == {root.trace}


def test_worker_and_learner_agree_on_which_traces_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    tids = [TrajectoryId("0000-00000001", 0, sample) for sample in range(60)]
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    with collecting() as collector:
        send_to(collector, monkeypatch)
        with open_sample_traces("run", "a") as one, open_sample_traces("run", "b") as other:
            for tid in tids:
                play(one, tid)
                play(other, tid, outcome=SubmitOutcome.FENCED)
        with open_step_traces("run", IDENTITY) as steps:
            assert steps is not None
            links = [steps.link(tid) for tid in tids]
    sampled = {root.trace for root in collector.named("trajectory")}
    assert 10 < len(sampled) < 50
    assert {format(link.context.trace_id, "032x") for link in links if link.context.trace_flags.sampled} == sampled
    assert {(turn.trace, turn.resource["service.instance.id"]) for turn in collector.named("turn")} == {
        (trace, worker) for trace in sampled for worker in "ab"
    }


@pytest.mark.parametrize("is_open", [False, True], ids=["closed port", "never answers"])
def test_a_collector_that_is_away_is_said_once(
    is_open: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        if not is_open:
            silent.close()
        monkeypatch.setattr("headway.deploy.observe.tracing.spans.CLOSE_S", 2.0)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
        monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "20")
        monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "10")
        with caplog.at_level(logging.INFO), open_sample_traces("run", "w") as samples:
            for sample in range(200):
                play(samples, TrajectoryId("0000-00000001", 0, sample))
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 1, said
    assert said[0].startswith(f"Traces do not reach {url}: ")


def test_a_stopwatch_has_no_gaps() -> None:
    watch = Stopwatch()
    for phase in ("take", "pack", "take"):
        watch.lap(phase)
    assert [lap.phase for lap in watch.laps] == ["take", "pack", "take"]
    assert all(one.end_s == other.start_s for one, other in zip(watch.laps, watch.laps[1:], strict=False))
    assert seconds_by_phase([Lap("take", 1.0, 2.0), Lap("pack", 2.0, 2.5), Lap("take", 2.5, 4.0)]) == {
        "take": 2.5,
        "pack": 0.5,
    }


def send_to(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in collector.environment.items():
        monkeypatch.setenv(name, value)


def trained(step: int, tids: list[TrajectoryId]) -> Any:
    """Return a step of these trajectories, each of whose phases took a second."""
    return SimpleNamespace(
        version=WeightVersion(1, step),
        scored=SimpleNamespace(trajectories=[SimpleNamespace(tid=tid) for tid in tids]),
        laps=[Lap(phase, 100.0 + number, 101.0 + number) for number, phase in enumerate(PHASES)],
    )


def lease_of(tid: TrajectoryId) -> Lease:
    prompt = Prompt(group=tid.group, token_ids=[1], text="", ground_truth="", data_source="test", num_samples=1)
    return Lease(tid=tid, identity=IDENTITY, token="token", ttl_s=1.0, prompt=prompt)


def play(
    samples: SampleTracer, tid: TrajectoryId, *, turns: int = 1, outcome: SubmitOutcome = SubmitOutcome.ACCEPTED
) -> None:
    """Record a sample as a worker does: turns of two tokens, with an answer of one token in between."""
    lease, recorder = lease_of(tid), Recorder()
    with samples.sample(lease, recorder) as trace:
        for turn in range(turns):
            if turn:
                recorder.add_environment_tokens([7], 0.0)
            with trace.generating():
                version = WeightVersion(1, turn)
                recorder.add(Chunk(token_ids=[2, 3], logprobs=[-1.0, -1.0], version=version, finish_reason="stop"))
            with trace.scoring():
                pass
        trace.submitted(recorder.to_trajectory(lease, {}, 0.75, "w"), outcome)
