"""Metrics of steps, workers' reports and states of runs, from which tests make displays and summaries."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from headway.broker.schema import WeightVersion
from headway.broker.schema.status import (
    AgentInfo,
    PoolInfo,
    QueueAges,
    QueueDepths,
    RunStatus,
    ScorerInfo,
    ScoringQueue,
    WorkerInfo,
)
from headway.broker.schema.step_metrics import AgentFigures, LagFigures, StepMetrics
from headway.deploy.observe.sinks.base import SinkRun
from headway.deploy.observe.sinks.jsonl import JsonlSink
from headway.deploy.run.events import EvaluationEvent, StageEvent, StepEvent

POOL = PoolInfo(pool="gpu", host="node", pid=1, running=3, leaving=1, restarting=0, given_up=2, wanted=4)
SCORER = ScorerInfo(process="s1", scorer="quality", kind="model", host="node", pid=2, state="ready", device="cpu")
SCORING = ScoringQueue(
    scorer="quality", waiting=5, leased=2, oldest_s=1.5, answered=40, failed=1, expired_leases=3, bytes=4096
)


def step_metrics(step: int, *, incarnation: int = 1, reward: float = 0.5, total_steps: int = 60) -> StepMetrics:
    """Return the metrics of a step of two seconds, of which the learner waited half a second."""
    return StepMetrics(
        incarnation=incarnation,
        step=step,
        total_steps=total_steps,
        time_s=2.0 * (step + 1),
        reward_mean=reward,
        reward_std=0.1,
        response_tokens_mean=15.5,
        lag_mean=1.25,
        lag_max=2,
        lag_histogram={0: 20, 1: 200, 2: 36},
        token_lag_histogram={0: 500, 1: 3000, 2: 500},
        response_length_histogram={8: 56, 16: 200},
        by_lag={
            0: LagFigures(trajectories=20, tokens=500, reward_mean=reward + 0.1, ratio_mean=1.0, ess=1.0),
            1: LagFigures(
                trajectories=200, tokens=3000, reward_mean=reward, ratio_mean=1.1, ess=0.9, clip_fraction=0.25
            ),
            2: LagFigures(trajectories=36, tokens=500, reward_mean=reward - 0.1, ratio_mean=0.8, ess=0.5),
        },
        groups=32,
        trajectories=256,
        mixed_version_trajectories=40,
        trained_tokens=4000,
        packed_tokens=7000,
        micro_batches=1,
        packing_efficiency=0.875,
        loss=0.01,
        grad_norm=0.5,
        learning_rate=5e-4,
        algorithm={"ess": 0.9},
        reward={"score": reward, "score/exact": 0.25},
        reward_samples={"score": 24, "score/exact": 20},
        waited_mean_s=1.5,
        waited_max_s=4.5,
        broker_calls=40,
        broker_s=0.1,
        take_s=0.5,
        train_s=1.2,
        publish_s=0.2,
        checkpoint_s=0.1,
        step_s=2.0,
    )


def bare_metrics(**values: Any) -> StepMetrics:
    """Return a step with these `values`; its other figures are 0, or missing where a step may lack them."""
    zeros: dict[str, Any] = {field.name: 0 for field in msgspec.structs.fields(StepMetrics) if field.required}
    return StepMetrics(**zeros | {"lag_histogram": {}, "algorithm": {}} | values)


def step_event(step: int, tids: Sequence[str] = (), *, incarnation: int = 1, reward: float = 0.5) -> StepEvent:
    """Return the same step with the samples that it trained."""
    return StepEvent(metrics=step_metrics(step, incarnation=incarnation, reward=reward), tids=tuple(tids))


def evaluation(incarnation: int, step: int, pass_rate: float) -> EvaluationEvent:
    """Return a pass rate that was measured before `step`."""
    return EvaluationEvent(incarnation=incarnation, step=step, pass_rate=pass_rate)


def sink_run(directory: Path, identity: str = "") -> SinkRun:
    """Return the run of that directory as a sink receives it."""
    return SinkRun(name="arithmetic", identity=identity, directory=directory)


def stage_event(steps: int, **figures: Any) -> StageEvent:
    """Return a step of a `dpo` stage."""
    return StageEvent(**{"steps": steps, "part": "dpo", "loss": 1 / steps, **figures})


def open_record(directory: Path, identity: str = "") -> JsonlSink:
    """Open the files of a run as its learner does."""
    record = JsonlSink()
    record.open(sink_run(directory, identity))
    return record


def write_resumed_run(directory: Path) -> None:
    """Write a run of five steps, killed after the fourth and resumed at step 3, with a first and a last evaluation."""
    record = open_record(directory)
    record.write(evaluation(1, 0, 0.25))
    for incarnation, steps in ((1, range(4)), (2, range(3, 5))):
        for step in steps:
            record.write(step_event(step, [f"g{step}:0:0"], incarnation=incarnation, reward=step / 4))
    record.write(evaluation(2, 5, 0.875))


def worker(name: str, version: WeightVersion | None, *, last_error: str = "") -> WorkerInfo:
    """Return the report of a busy worker."""
    return WorkerInfo(
        worker=name,
        host="node",
        pid=4711,
        engine="embedded",
        state="generating",
        version=version,
        broadcast_epoch=2,
        wants_broadcast=True,
        capacity=64,
        active=60,
        generated_tokens=100_000,
        submitted=2000,
        tokens_per_s=2500.0,
        swaps=36,
        broker_calls=50,
        broker_s=0.25,
        swap_s=12.5,
        paused_s=1.5,
        last_error=last_error,
    )


AGENT = AgentInfo(
    episodes=120,
    running_requests=16,
    waiting_for_tools=96,
    finished=1000,
    finished_turns=3500,
    turns=4000,
    tool_s=1000.0,
    read_tokens=30_000,
    sampled_tokens=70_000,
    forks=40,
    reread_tokens=500,
    unseen_turns=12,
    resumed_calls=3,
    repeated_calls=2,
    lost_calls=6,
    restarted=8,
    over_budget=5,
    turn_timeouts=1,
    failures={"raised": 7, "timeout": 2},
    refused_calls={"temperature": 4, "busy": 1},
)
"""A worker's report of its agents."""
AGENT_FIGURES = AgentFigures(
    episodes=256,
    turns_mean=3.5,
    turns_max=8,
    tool_calls_mean=2.5,
    tool_s_mean=1.25,
    versions_mean=1.5,
    fork_fraction=0.02,
    reread_fraction=0.01,
    unseen_fraction=0.001,
    resumed_calls=3,
    failures={"raised": 2},
)


def run_status(steps: int = 37) -> RunStatus:
    """Return the state of a run in its middle, with two workers; one has had an error with brackets in it."""
    metrics = tuple(step_metrics(step, reward=0.25 + step / 60) for step in range(steps))
    return RunStatus(
        run="arithmetic",
        state="training",
        incarnation=1,
        announced=WeightVersion(1, steps),
        queues=QueueDepths(
            pool=64,
            admitted=1200,
            retry=3,
            leased=120,
            open=40,
            ready=12,
            pinned=32,
            dropped_stale=0,
            requeued_stale=1,
            expired_leases=5,
            fenced=2,
            rejected=0,
            payload_bytes=1_500_000,
        ),
        ages=QueueAges(oldest_ready_s=7.5, mean_ready_s=2.5, oldest_lease_s=3.0),
        workers=(
            worker("node-worker-0-ab12", WeightVersion(1, steps)),
            worker("node-worker-1-cd34", None, last_error="[x]"),
        ),
        last_step=metrics[-1] if metrics else None,
        recent_steps=metrics,
    )
