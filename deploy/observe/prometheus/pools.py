"""The learner's metrics of pools, of workers that do not work as they should, and of scorers."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import Metric

from headway.deploy.run.events import HeartbeatEvent

from .families import by_name, metric

POOL_STATES = ("wanted", "running", "leaving", "restarting", "given_up")
"""Fields of PoolInfo."""
SCORER_STATES = ("loading", "ready", "draining")


def of_pools(event: HeartbeatEvent) -> Iterator[Metric]:
    """Yield what supervisors say of their pools, and how many workers are late or in quarantine."""
    yield by_name(
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


def of_scorers(event: HeartbeatEvent) -> Iterator[Metric]:
    """Yield the scorers' processes and the requests that wait for them."""
    if not (event.scorers or event.scoring):
        return
    states: Counter[tuple[str, str]] = Counter((one.scorer, one.state) for one in event.scorers)
    names = {one.scorer for one in event.scorers} | {one.scorer for one in event.scoring}
    yield by_name(
        "headway_scorer_processes",
        "Living processes of each scorer, by state.",
        ("scorer", "state"),
        {(name, state): float(states[name, state]) for name in sorted(names) for state in SCORER_STATES},
    )
    yield by_name(
        "headway_scorer_requests",
        "Requests to each scorer that wait, or that one of its processes holds.",
        ("scorer", "state"),
        {(one.scorer, state): float(getattr(one, state)) for one in event.scoring for state in ("waiting", "leased")},
    )
    yield by_name(
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
