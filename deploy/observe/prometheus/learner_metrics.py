"""The learner's metrics: sums and last values of its steps, and the pools, scorers and queues as it saw them last."""

import time
from collections import Counter
from collections.abc import Iterator
from threading import Lock

import msgspec
from prometheus_client.core import HistogramMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from headway.broker.schema.step_metrics import AgentFigures
from headway.deploy.run.agent_figures import flat_figures
from headway.deploy.run.events import EvaluationEvent, Event, HeartbeatEvent, StageEvent, StepEvent
from headway.deploy.run.figures import generated_per_s
from headway.learner.experience.length_drift import drift_of

from .exposition import STATES, Family, family_metrics, labelled_metric, metric

LAG_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512, 1000)
"""Upper bounds of the histograms' buckets, in steps, those of `by_lag` in metrics.jsonl.
`staleness.max_lag` is at most 1000."""
LAST_STEP = (
    Family("headway_learner_incarnation", "How many learners have claimed the run so far.", "incarnation"),
    Family("headway_learner_step", "Number of the last trained step; the first is 0.", "step"),
    Family("headway_learner_planned_steps", "Steps of the run: learner.steps.", "total_steps"),
    Family("headway_learner_loop_seconds", "Time since this learner began its loop.", "time_s"),
    Family("headway_learner_step_seconds", "Time of the last step, waiting included.", "step_s"),
    Family("headway_learner_reward_mean", "Mean reward of the last step's trajectories.", "reward_mean"),
    Family("headway_learner_reward_stddev", "Standard deviation of the same rewards.", "reward_std"),
    Family("headway_learner_flat_groups_ratio", "Share of its groups whose rewards were all equal.", "flat_groups"),
    Family("headway_learner_truncated_ratio", "Share of its samples that ended at their longest length.", "truncated"),
    Family("headway_learner_truncated_samples", "Their number.", "truncated_samples"),
    Family("headway_learner_truncated_reward_mean", "Their mean reward.", "truncated_reward_mean"),
    Family("headway_learner_long_prompts", "Prompts that this learner passed over as too long.", "long_prompts"),
    Family("headway_learner_response_mean_tokens", "Mean length of a trained response.", "response_tokens_mean"),
    Family("headway_learner_lag_mean_steps", "Mean lag of the last step's trajectories.", "lag_mean"),
    Family("headway_learner_lag_max_steps", "Largest lag of a token that the last step trained.", "lag_max"),
    Family(
        "headway_learner_packing_efficiency_ratio",
        "Share of learner.micro_batch_tokens that the mean micro-batch of the last step filled.",
        "packing_efficiency",
    ),
    Family(
        "headway_learner_queue_mean_seconds", "Mean time that ready groups of the last step waited.", "waited_mean_s"
    ),
    Family("headway_learner_queue_max_seconds", "The longest of these times.", "waited_max_s"),
    Family("headway_learner_loss", "Loss of the last step; absent if it was not finite.", "loss"),
    Family("headway_learner_gradient_norm", "Norm of the gradient; absent if it was not finite.", "grad_norm"),
    Family("headway_learner_learning_rate", "The optimizer's learning rate.", "learning_rate"),
)
SUMS = (
    Family("headway_learner_steps_total", "Steps trained.", "steps"),
    Family("headway_learner_skipped_updates_total", "Steps whose gradient was not finite.", "skipped_updates"),
    Family("headway_learner_groups_total", "Groups trained.", "groups"),
    Family("headway_learner_trajectories_total", "Trajectories trained.", "trajectories"),
    Family(
        "headway_learner_untrained_trajectories_total",
        "Trajectories of trained groups that the loss left out.",
        "untrained_trajectories",
    ),
    Family(
        "headway_learner_mixed_version_trajectories_total",
        "Trained trajectories that weights of several versions sampled.",
        "mixed_version_trajectories",
    ),
    Family("headway_learner_trained_tokens_total", "Response tokens in the loss.", "trained_tokens"),
    Family("headway_learner_packed_tokens_total", "Tokens that went through the model.", "packed_tokens"),
    Family("headway_learner_micro_batches_total", "Forward and backward passes, over all replicas.", "micro_batches"),
    Family("headway_learner_broker_calls_total", "Calls to the broker that were answered.", "broker_calls"),
    Family("headway_learner_broker_call_seconds_total", "Time until they were answered, summed up.", "broker_s"),
    Family(
        "headway_learner_phase_seconds_total",
        "The loop's time by what it did: waiting for a batch, training, publishing, saving a checkpoint.",
        label="phase",
        by_label={"waiting": "take_s", "training": "train_s", "publishing": "publish_s", "saving": "checkpoint_s"},
    ),
)
QUEUES = (
    Family(
        "headway_broker_groups",
        "Groups in the broker, by state.",
        label="state",
        by_label={"waiting": "pool", "generating": "open", "ready": "ready", "taken": "pinned"},
    ),
    Family(
        "headway_broker_samples",
        "Samples that wait for a lease, and samples that a worker holds a lease of.",
        label="state",
        by_label={"waiting": "retry", "leased": "leased"},
    ),
    Family("headway_broker_stored_bytes", "Bytes of samples that the broker holds.", "payload_bytes"),
    Family("headway_broker_admitted_groups_total", "Groups admitted since the run began.", "admitted"),
    Family("headway_broker_requeued_groups_total", "Groups sent back over the bound on lag.", "requeued_stale"),
    Family(
        "headway_broker_dropped_groups_total",
        "Groups dropped: over the bound on lag, or because their rewards were the same, or all samples truncated.",
        label="reason",
        by_label={"stale": "dropped_stale", "same_rewards": "uninformative"},
    ),
    Family("headway_broker_trimmed_samples_total", "Samples that their groups went without.", "trimmed_samples"),
    Family("headway_broker_expired_leases_total", "Leases that their worker lost.", "expired_leases"),
    Family(
        "headway_broker_copied_leases_total",
        "Leases of samples beside another worker's, which did not get on with them.",
        "copied_leases",
    ),
    Family(
        "headway_broker_refused_samples_total",
        "Samples refused: late or duplicate, or impossible.",
        label="reason",
        by_label={"late": "fenced", "impossible": "rejected"},
    ),
    Family("headway_broker_generated_tokens_total", "Response tokens of accepted samples.", "generated_tokens"),
    Family("headway_broker_wasted_tokens_total", "Response tokens of refused samples.", "wasted_tokens"),
    Family("headway_broker_resumed_tokens_total", "Tokens after which a worker continued.", "resumed_tokens"),
    Family(
        "headway_broker_skipped_evaluations_total", "Evaluations by workers without a result.", "skipped_evaluations"
    ),
    Family("headway_broker_worker_restarts_total", "Processes started in the place of others.", "worker_restarts"),
    Family("headway_broker_discarded_tokens_total", "Tokens of segments that were of no use.", "discarded_tokens"),
)
AGES = (
    Family("headway_broker_oldest_ready_group_seconds", "Longest wait of a ready group so far.", "oldest_ready_s"),
    Family("headway_broker_ready_group_mean_seconds", "Mean wait of the ready groups so far.", "mean_ready_s"),
    Family(
        "headway_broker_oldest_lease_seconds",
        "Longest time since a leased sample was leased, or saved as a segment.",
        "oldest_lease_s",
    ),
    Family(
        "headway_broker_next_sample_seconds",
        "Time for which the group of the sample that is leased next has been offered to workers.",
        "next_sample_s",
    ),
)
TALLIES = (
    (
        "headway_broker_begun_groups_total",
        "Groups admitted, by the prompt's tokens up to a power of two.",
        "dispatched_by_prompt_length",
        "prompt_tokens",
    ),
    (
        "headway_broker_trained_groups_total",
        "Groups committed, by the prompt's tokens up to a power of two.",
        "trained_by_prompt_length",
        "prompt_tokens",
    ),
    (
        "headway_broker_finished_samples_total",
        "Samples that workers finished, refused ones too, by the response's tokens up to a power of two.",
        "finished_by_response_length",
        "response_tokens",
    ),
    (
        "headway_broker_cut_samples_total",
        "Samples given up unfinished, by the tokens saved until then, up to a power of two.",
        "cut_by_response_length",
        "response_tokens",
    ),
    (
        "headway_broker_leases_total",
        "Leases, by how many steps the worker's weights were behind the announced ones.",
        "dispatched_by_lag",
        "lag",
    ),
    (
        "headway_broker_resumed_lag_tokens_total",
        "Tokens after which another worker goes on, by their lag when it leased the sample.",
        "resumed_by_lag",
        "lag",
    ),
)
"""The name, the text, the field of Tallies and the label of each."""
BY_LAG = (
    ("headway_learner_lag_reward_mean", "Mean reward of the last step's trajectories", "reward_mean"),
    ("headway_learner_lag_ratio_mean", "Mean ratio of the learner's policy to the sampler's", "ratio_mean"),
    ("headway_learner_lag_effective_sample_ratio", "Effective sample size as a share of the tokens", "ess"),
    ("headway_learner_lag_clipped_ratio", "Share of the tokens that the objective clipped", "clip_fraction"),
    ("headway_learner_lag_masked_ratio", "Share of the tokens that corrections masked", "mask_fraction"),
    ("headway_learner_lag_reverse_kl_nats", "Reverse KL to the teacher", "reverse_kl"),
)
"""The name, the text and the field of LagFigures of each."""

QUEUED = (
    (
        "headway_broker_lag_generating_groups",
        "Groups without all samples, by the lag of their oldest token",
        "generating",
    ),
    ("headway_broker_lag_ready_groups", "Ready groups, by the lag of their oldest token", "ready"),
    ("headway_broker_lag_ready_samples", "Samples of ready groups, by the lag of their oldest token", "ready_samples"),
    ("headway_broker_lag_ready_tokens", "Response tokens of ready groups, by their own lag", "ready_tokens"),
)
"""The name, the text and the field of VersionGroups of each."""


class RunCollector(Collector):
    """Keeps what the learner's events say, for scrapes in other threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._sums: Counter[str] = Counter()
        self._lags: Counter[int] = Counter()
        self._token_lags: Counter[int] = Counter()
        self._lengths: Counter[int] = Counter()
        self._run: dict[str, str] = {}
        self._step: StepEvent | None = None
        self._step_at = 0.0
        """When the last step was reported, in seconds since 1970."""
        self._evaluation: EvaluationEvent | None = None
        self._heartbeat: HeartbeatEvent | None = None
        self._heartbeat_at = 0.0
        self._stage: StageEvent | None = None

    def begin(self, name: str, identity: str) -> None:
        """Name the run."""
        with self._lock:
            self._run = {"run": name, "identity": identity}

    def note(self, event: Event) -> None:
        """Take an event in."""
        with self._lock:
            match event:
                case StepEvent():
                    self._add(event)
                case EvaluationEvent():
                    self._evaluation = event
                case HeartbeatEvent():
                    self._heartbeat, self._heartbeat_at = event, time.time()
                case StageEvent():
                    self._stage = event

    def _add(self, event: StepEvent) -> None:
        self._step, self._step_at = event, time.time()
        figures = msgspec.structs.asdict(event.metrics)
        figures |= {"steps": 1, "skipped_updates": int(event.metrics.grad_norm is None)}
        for family in SUMS:
            for name in (family.by_label or {"": family.field}).values():
                self._sums[name] += figures[name]
        self._lags.update(event.metrics.lag_histogram)
        self._token_lags.update(event.metrics.token_lag_histogram)
        self._lengths.update(event.metrics.response_length_histogram)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, as of one moment."""
        with self._lock:
            found = [*self._of_steps(), *self._of_heartbeat(), *self._of_stage()]
        yield from found

    def _of_steps(self) -> Iterator[Metric]:
        yield InfoMetricFamily("headway_run", "The run that this learner trains.", self._run)
        yield from family_metrics(SUMS, self._sums)
        yield _lag_histogram(
            "headway_learner_trajectory_lag_steps",
            "Lag of the oldest trained token of each trained trajectory.",
            self._lags,
        )
        yield _lag_histogram("headway_learner_token_lag_steps", "Lag of each trained token.", self._token_lags)
        yield metric(
            "headway_learner_trained_samples_total",
            "Samples trained, by the response's tokens up to a power of two.",
            {str(length): float(count) for length, count in sorted(self._lengths.items())},
            "response_tokens",
        )
        if self._step is not None:
            metrics = self._step.metrics
            yield from family_metrics(LAST_STEP, msgspec.structs.asdict(metrics))
            for name, text, field in BY_LAG:
                values = {str(lag): getattr(figures, field) for lag, figures in metrics.by_lag.items()}
                yield metric(name, f"{text}, by the largest lag of a bucket.", values, "lag")
            yield metric("headway_learner_algorithm", "Figures of the loss, by name.", metrics.algorithm, "figure")
            yield metric("headway_learner_reward", "Means of rewards and their measures.", metrics.reward, "figure")
            if isinstance(metrics.agent, AgentFigures):
                figures_of_agent = flat_figures(metrics.agent)
                yield metric("headway_learner_agent", "Figures of agents' episodes.", figures_of_agent, "figure")
            yield metric(
                "headway_learner_last_step_timestamp_seconds", "When the last step ended.", {"": self._step_at}
            )
        if self._evaluation is not None:
            rate, step = self._evaluation.pass_rate, self._evaluation.step
            yield metric("headway_learner_pass_rate", "Pass rate on held-out prompts.", {"": rate})
            if (at_k := self._evaluation.pass_at_k) is not None:
                yield metric(
                    "headway_learner_pass_at_k", "Share of held-out prompts with a sample that passed.", {"": at_k}
                )
            yield metric("headway_learner_pass_rate_step", "The step before which it was measured.", {"": step})

    def _of_stage(self) -> Iterator[Metric]:
        """Yield the figures of a stage without workers, in whose process there is no learner."""
        if (stage := self._stage) is not None:
            yield metric("headway_stage_steps", "Steps of the stage so far.", {"": stage.steps})
            figures = {"loss": stage.loss, "pass_rate": stage.pass_rate, **stage.metrics}
            yield metric("headway_stage_figure", "Figures of the stage's last step, by name.", figures, "figure")

    def _of_heartbeat(self) -> Iterator[Metric]:
        """Yield the pool and the queues. A worker that has left is not among them any more."""
        if self._heartbeat is None:
            return
        workers, tallies = self._heartbeat.workers, self._heartbeat.tallies
        for name, text, field, label in TALLIES:
            counts = {str(of): float(count) for of, count in getattr(tallies, field).items()}
            yield metric(name, text, counts, label)
        yield from family_metrics(QUEUES, msgspec.structs.asdict(self._heartbeat.queues))
        yield from family_metrics(AGES, msgspec.structs.asdict(self._heartbeat.ages))
        for name, text, field in QUEUED:
            counts = _by_lag(self._heartbeat, field)
            yield metric(name, f"{text}: steps behind the announced weights.", counts, "lag")
        states: Counter[str] = Counter(worker.state for worker in workers)
        yield metric("headway_pool_workers", "Living workers, by state.", {s: states[s] for s in STATES}, "state")
        versions = {worker.worker: worker.version.step if worker.version else None for worker in workers}
        yield metric("headway_pool_weight_step", "Step of the weights of each living worker.", versions, "worker")
        rates = {worker.worker: worker.tokens_per_s for worker in workers}
        yield metric(
            "headway_pool_worker_tokens_per_second", "Tokens that each living worker generates.", rates, "worker"
        )
        yield metric(
            "headway_broker_length_drift_ratio",
            "At least so far apart are the lengths of begun and of trained prompts, from 0 (alike) to 1.",
            {"": drift_of(tallies, self._heartbeat.queues)},
        )
        yield from pool_metrics(self._heartbeat)
        yield from scorer_metrics(self._heartbeat)
        rate = generated_per_s(workers)
        yield metric("headway_pool_tokens_per_second", "Tokens that the workers generate.", {"": rate})
        yield metric(
            "headway_pool_seen_timestamp_seconds", "When the learner looked at the pool.", {"": self._heartbeat_at}
        )


def _by_lag(event: HeartbeatEvent, field: str) -> dict[str, float]:
    """Return what a field of VersionGroups counts, by lag. The weights that are offered count with the announced."""
    announced = event.announced.step if event.announced is not None else 0
    counts = Counter[str]()
    for version in event.versions:
        if count := getattr(version, field):
            counts[str(max(0, announced - version.step))] += count
    return {lag: float(count) for lag, count in counts.items()}


def _lag_histogram(name: str, text: str, lags: Counter[int]) -> Metric:
    counts = [sum(count for lag, count in lags.items() if lag <= bound) for bound in LAG_BUCKETS]
    buckets = [(str(float(bound)), float(count)) for bound, count in zip(LAG_BUCKETS, counts, strict=True)]
    total = sum(lag * count for lag, count in lags.items())
    return HistogramMetricFamily(name, text, [*buckets, ("+Inf", float(lags.total()))], total)


POOL_STATES = ("wanted", "running", "leaving", "restarting", "given_up")
"""Fields of PoolInfo."""
SCORER_STATES = ("loading", "ready", "draining")


def pool_metrics(event: HeartbeatEvent) -> Iterator[Metric]:
    """Yield what supervisors say of their pools, and how many workers are late or in quarantine."""
    yield labelled_metric(
        "headway_pool_processes",
        "Worker processes of each supervised pool: wanted by scale, running, asked to leave, started again after a"
        " failure, and not started again.",
        ("pool", "state"),
        {(pool.pool, state): float(getattr(pool, state)) for pool in event.pools for state in POOL_STATES},
    )
    yield metric(
        "headway_pool_late_workers",
        "Living workers that missed heartbeats: they are dead, stand still or are cut off.",
        {"": event.late_workers},
    )
    yield metric(
        "headway_pool_quarantined_workers",
        "Worker processes that get no more leases, as too many of their samples were refused.",
        {"": event.quarantined_workers},
    )


def scorer_metrics(event: HeartbeatEvent) -> Iterator[Metric]:
    """Yield the scorers' processes and the requests that wait for them."""
    if not (event.scorers or event.scoring):
        return
    states: Counter[tuple[str, str]] = Counter((one.scorer, one.state) for one in event.scorers)
    names = {one.scorer for one in event.scorers} | {one.scorer for one in event.scoring}
    yield labelled_metric(
        "headway_scorer_processes",
        "Living processes of each scorer, by state.",
        ("scorer", "state"),
        {(name, state): float(states[name, state]) for name in sorted(names) for state in SCORER_STATES},
    )
    yield labelled_metric(
        "headway_scorer_requests",
        "Requests to each scorer that wait, or that one of its processes holds.",
        ("scorer", "state"),
        {(one.scorer, state): float(getattr(one, state)) for one in event.scoring for state in ("waiting", "leased")},
    )
    yield labelled_metric(
        "headway_scorer_requests_ended_total",
        "Requests to each scorer that were answered, or that several of its processes could not answer.",
        ("scorer", "outcome"),
        {(one.scorer, how): float(getattr(one, how)) for one in event.scoring for how in ("answered", "failed")},
    )
    for name, text, field in (
        ("headway_scorer_oldest_request_seconds", "For how long the oldest open request has waited.", "oldest_s"),
        ("headway_scorer_expired_leases_total", "Requests whose scorer lost its lease.", "expired_leases"),
        ("headway_scorer_stored_bytes", "Bytes of requests and answers that the broker holds.", "bytes"),
    ):
        yield metric(name, text, {one.scorer: float(getattr(one, field)) for one in event.scoring}, "scorer")
