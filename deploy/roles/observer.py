"""Turns what the learner's loop reports into events for sinks, live metrics and evaluations."""

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from statistics import fmean
from typing import TYPE_CHECKING

from msgspec.structs import replace

from headway.broker.schema import Trajectory, WeightVersion
from headway.broker.schema.agent_measures import is_worker_measure
from headway.broker.schema.status import RunStatus
from headway.broker.schema.step_metrics import StepMetrics
from headway.deploy.observe.run_warnings import FLAT_STEPS, FlatRewardReporter
from headway.deploy.observe.sinks.base import Sinks
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.run.agent_figures import agent_figures
from headway.deploy.run.events import EvaluationEvent, HeartbeatEvent, StepEvent
from headway.deploy.run.figures import finite
from headway.learner.backends.base import Backend
from headway.learner.experience.broker_retries import StopRequested
from headway.learner.experience.length_drift import length_class
from headway.learner.experience.stream import Experience
from headway.learner.objective.lag_metrics import figures_by_lag, lags_of_rollouts, tokens_by_lag
from headway.learner.objective.shaping import is_truncated, trajectories_of
from headway.learner.stages.loop import TrainedStep, seconds_by_phase

from .held_out_evaluation import Evaluator, WorkerEvaluations

if TYPE_CHECKING:
    from headway.deploy.observe.tracing.spans import StepTraces
    from headway.rollout_workers.evaluation import EvalResult

HEARTBEAT_S = 10.0
"""Seconds between two heartbeat events after steps, for sinks that want them. Each fetches the last steps from the
broker as well."""
log = logging.getLogger(__name__)


class RunObserver:
    """Observes the loop. Every rank has one, since evaluations gather weights; only the first rank's writes and
    measures."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        first_step: int,
        sinks: Sinks | None,
        experience: Experience | None,
        evaluator: Evaluator | None = None,
        by_workers: WorkerEvaluations | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        on_evaluated: Callable[[EvaluationEvent], None] | None = None,
        traces: "StepTraces | None" = None,
    ) -> None:
        """`evaluator` measures in this process, `by_workers` beside training; both None: other ranks do, or none."""
        self._recipe = recipe
        self._first_step = first_step
        self._sinks = sinks
        self._experience = experience
        self._evaluator = evaluator
        self._traces = traces
        self._by_workers = by_workers
        self._should_stop = should_stop
        self._on_evaluated = on_evaluated
        self._step = first_step
        self._started = time.monotonic()
        self._last_step: StepMetrics | None = None
        self._next_heartbeat_s = 0.0
        self._last_steps, self._flat = deque[StepMetrics](maxlen=FLAT_STEPS), FlatRewardReporter()

    def on_publish(self, version: WeightVersion) -> None:
        """Have workers evaluate a version that is about to be published, where the recipe wants it."""
        self._step = version.step
        if self._by_workers is not None:
            is_last = version.step == self._recipe.learner.steps
            self._by_workers.publishes(version, is_due=self._is_evaluation_due(version.step, is_last))

    def on_weights(self, version: WeightVersion, backend: Backend, is_last: bool) -> None:
        """Measure the pass rate where the recipe wants it: before the run, after it, and every so many steps. What
        workers evaluate is waited for after the run alone."""
        if self._recipe.evaluation.where == "workers":
            self._collect_evaluations(is_last=is_last)
            return
        if not self._is_evaluation_due(version.step, is_last):
            return
        tensors = backend.named_tensors()
        if self._evaluator is not None:
            self._note_evaluation(version, self._evaluator.measure(tensors))
        for _ in tensors:  # gathering is collective
            pass

    def _collect_evaluations(self, *, is_last: bool) -> None:
        if self._by_workers is None:
            return
        with suppress(StopRequested):
            found = self._by_workers.wait(self._should_stop) if is_last else self._by_workers.collect()
            for version, result in found:
                self._note_evaluation(version, result)

    def _note_evaluation(self, version: WeightVersion, result: "EvalResult") -> None:
        if self._sinks is None:
            return
        event = EvaluationEvent(
            incarnation=version.incarnation,
            step=version.step,
            pass_rate=result.pass_rate,
            pass_at_k=result.pass_at_k,
            samples=result.samples,
            prompts=result.prompts,
            reward_mean=result.reward_mean,
            response_tokens_mean=result.response_tokens_mean,
            reward=result.reward,
            known_at_step=self._step,
        )
        self._sinks.write(event)
        if self._on_evaluated is not None:
            self._on_evaluated(event)
        log.info("step %d: held-out pass rate %.3f", version.step, result.pass_rate)

    def on_step(self, step: TrainedStep) -> None:
        """Give a step to sinks, broker and traces."""
        if self._sinks is None or self._experience is None:
            return
        if self._traces is not None:
            self._traces.add(step)
        event = step_event(step, self._recipe.learner.steps, time.monotonic() - self._started)
        event = replace(event, metrics=replace(event.metrics, **self._broker_figures()))
        metrics = self._last_step = event.metrics
        self._sinks.write(event)
        self._experience.report(metrics)
        if self._sinks.wants_heartbeats and metrics.time_s >= self._next_heartbeat_s:
            self._next_heartbeat_s = metrics.time_s + HEARTBEAT_S
            if (status := self._experience.status()) is not None:
                self._sinks.write(HeartbeatEvent.of(status, metrics))
        if metrics.grad_norm is None:
            log.warning("step %d: the gradient was not finite, so its update was skipped", metrics.step + 1)
        self._last_steps.append(metrics)
        if warning := self._flat.news(list(self._last_steps)):
            log.warning("step %d: %s", metrics.step + 1, warning)
        log.info(
            "step %d/%d  reward %.3f  lag %.2f (max %d)  %.2f s",
            metrics.step + 1,
            metrics.total_steps,
            metrics.reward_mean,
            metrics.lag_mean,
            metrics.lag_max,
            metrics.step_s,
        )

    def _broker_figures(self) -> dict[str, float | None]:
        """Return what a step's metrics say of the prompts, of the queue and of the broker."""
        assert self._experience is not None
        waited_s, (calls, seconds) = self._experience.waited_s, self._experience.broker_calls()
        mean_s, max_s = (fmean(waited_s), max(waited_s)) if waited_s else (None, None)
        waited = {"waited_mean_s": mean_s, "waited_max_s": max_s, "broker_calls": calls, "broker_s": seconds}
        return {**waited, "long_prompts": self._experience.long_prompts}

    def on_end(self, status: RunStatus) -> None:
        """Give sinks the last look at the run, while its workers are there."""
        if self._sinks is not None:
            step = self._first_step if self._last_step is None else self._last_step.step
            self._sinks.write(HeartbeatEvent.later(status, step=step, time_s=time.monotonic() - self._started))

    def on_look(self, status: RunStatus) -> None:
        """Give sinks a look at the run from another thread, unless a step's look was given a moment ago: while the
        learner waits, the pool and the queues go on without a step."""
        elapsed_s = time.monotonic() - self._started
        if self._sinks is None or not self._sinks.wants_heartbeats or elapsed_s < self._next_heartbeat_s:
            return
        step = self._first_step if self._last_step is None else self._last_step.step
        self._sinks.offer(HeartbeatEvent.later(status, step=step, time_s=elapsed_s))

    def _is_evaluation_due(self, step: int, is_last: bool) -> bool:
        config = self._recipe.evaluation
        if config.prompts == 0:
            return False
        is_before_run = step == 0 and self._first_step == 0
        is_in_turn = config.every_steps > 0 and step > 0 and step % config.every_steps == 0
        return is_last or is_before_run or is_in_turn


def step_event(step: TrainedStep, total_steps: int, time_s: float) -> StepEvent:
    """Return the event of one step of a run or of a replay, with what it trained; `time_s` in seconds since its loop
    began."""
    metrics = _metrics(step, step.scored.trajectories, total_steps, time_s)
    return StepEvent(metrics=metrics, tids=tuple(str(trajectory.tid) for trajectory in step.scored.trajectories))


def _metrics(step: TrainedStep, trajectories: Sequence[Trajectory], total_steps: int, time_s: float) -> StepMetrics:
    sequences, taken = step.scored.sequences, trajectories_of(step.groups)
    truncated = sum(map(is_truncated, taken))
    lags = lags_of_rollouts(sequences)
    packed_tokens = sum(len(sequence.token_ids) for sequence in sequences)
    responses = [len(t.response_tokens) for t in trajectories]
    figures = {**step.update.algorithm, **step.scored.figures}
    seconds = seconds_by_phase(step.laps)
    rewards = step.scored.rewards
    train_s = seconds["pack"] + seconds["train"]
    return StepMetrics(
        incarnation=step.version.incarnation,
        step=step.version.step,
        total_steps=total_steps,
        time_s=time_s,
        reward_mean=rewards.mean,
        reward_std=rewards.std,
        reward={name: mean for name, mean in rewards.components.items() if not is_worker_measure(name)},
        reward_samples={name: count for name, count in rewards.counts.items() if not is_worker_measure(name)},
        flat_groups=rewards.flat_groups,
        truncated=truncated / len(taken) if taken else 0.0,
        truncated_samples=truncated,
        truncated_reward_mean=rewards.truncated,
        response_tokens_mean=fmean(responses or (0,)),
        lag_mean=fmean(lags or (0,)),
        lag_max=max(lags, default=0),
        lag_histogram=dict(sorted(Counter(lags).items())),
        token_lag_histogram=tokens_by_lag(sequences),
        response_length_histogram=dict(sorted(Counter(map(length_class, responses)).items())),
        by_lag=figures_by_lag(sequences, [t.reward for t in trajectories], step.update.by_lag),
        groups=len(step.groups),
        trajectories=len(trajectories),
        untrained_trajectories=len(taken) - len(trajectories),
        mixed_version_trajectories=sum(len({s.version for s in t.spans}) > 1 for t in trajectories),
        trained_tokens=sum(int(s.loss_mask.sum()) for s in sequences),
        packed_tokens=packed_tokens,
        packing_efficiency=step.update.computed_tokens / step.update.budget_tokens,
        micro_batches=step.update.micro_batches,
        loss=finite(step.update.loss),
        grad_norm=finite(step.update.grad_norm),
        learning_rate=step.update.learning_rate,
        agent=agent_figures(taken),
        algorithm={name: value for name, value in figures.items() if math.isfinite(value)},
        take_s=seconds["take"],
        train_s=train_s,
        publish_s=seconds["publish"],
        checkpoint_s=seconds["checkpoint"],
        step_s=seconds["checkpoint"] + seconds["take"] + train_s + seconds["publish"],
    )
