"""Names in one paragraph the process that a run waits for: the next step, the group that it lacks, the worker that
holds its samples.

The rules are asked in order, and the first that knows an answer gives it: an earlier one names the cause of what a
later one would name.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import msgspec

from headway.broker.client.broker import Broker
from headway.broker.client.status import MissingSample, StepProgress, UnfinishedGroup
from headway.broker.errors import RunNotFoundError
from headway.broker.schema.status import PoolInfo, RunStatus, ScoringQueue, WorkerInfo
from headway.broker.staleness import is_in_reach
from headway.deploy.recipe.pools import POOL
from headway.deploy.run.figures import WINDOW
from headway.rollout_workers.health import RUN_OVER

QUIET_S = 30.0
"""Nothing moved for a while: after so many seconds without a batch and without new weights, or after QUIET_STEPS times
the length of a step where that is longer."""
QUIET_STEPS = 3
REPEAT_S = 300.0
"""Seconds after which a log says again what has not changed."""
SILENT_S = 5.0
"""An engine that has made no token for less is not worth a word."""
MOST_HOLDERS = 4
_HOST_CHARACTERS, _ERROR_CHARACTERS = 60, 200

Who = Literal["learner", "workers", "nobody"]
Why = Literal[
    "no learner",
    "no scorers",
    "no weights",
    "training",
    "prompts",
    "store",
    "no workers",
    "workers pause",
    "stragglers",
    "learner busy",
    "groups",
]


class Bottleneck(msgspec.Struct, frozen=True, kw_only=True):
    """One answer: the process that waits, and its reason."""

    who: Who
    why: Why
    text: str
    """The whole chain, for people."""
    is_quiet: bool
    """Whether nothing has moved for a while."""
    quiet_s: float
    """The time since a batch was taken, a version announced or the run claimed."""
    group: str = ""
    """The unfinished group that the learner waits for, if one is known."""
    workers: tuple[str, ...] = ()
    """The workers that hold its missing samples."""


class Reminder:
    """Remembers what a reader was told of who waits, so that a log does not repeat it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reported: Why | None = None
        self._again_s = 0.0

    def news(self, waiting: Bottleneck | None) -> str:
        """Returns the paragraph to tell now: nothing has moved for a while, and the reason is a new one, or was told
        REPEAT_S ago. Else ""."""
        if waiting is None or not waiting.is_quiet:
            self._reported = None
            return ""
        if waiting.why == self._reported and self._clock() < self._again_s:
            return ""
        self._reported, self._again_s = waiting.why, self._clock() + REPEAT_S
        return waiting.text


Rule = Callable[[RunStatus, StepProgress], Bottleneck | None]


StatusReader = Callable[[], tuple[RunStatus, Bottleneck | None]]
"""Returns a run's status and who waits in it. Raises HeadwayError."""


async def read_status(broker: Broker, *, any_identity: bool = False) -> tuple[RunStatus, Bottleneck | None]:
    """Returns the run's status and who waits in it. `any_identity` and errors: as in `StatusVerbs.snapshot`."""
    status = await broker.status.snapshot(any_identity=any_identity)
    progress = await broker.progress.read()
    if progress is None:
        raise RunNotFoundError(f"Run {status.run} at {broker.url} was deleted meanwhile.")
    return status, find_bottleneck(status, progress)


def find_bottleneck(status: RunStatus, progress: StepProgress) -> Bottleneck | None:
    """Returns who waits for whom; None once the run is over."""
    if status.state in RUN_OVER:
        return None
    return next(found for rule in _RULES if (found := rule(status, progress)) is not None)


def _because(
    why: Why,
    text: str,
    status: RunStatus,
    progress: StepProgress,
    *,
    who: Who = "learner",
    group: str = "",
    workers: Sequence[str] = (),
) -> Bottleneck:
    return Bottleneck(
        who=who,
        why=why,
        text=text,
        is_quiet=progress.quiet_s >= _quiet_after_s(status),
        quiet_s=progress.quiet_s,
        group=group,
        workers=tuple(workers),
    )


def _quiet_after_s(status: RunStatus) -> float:
    seconds = [step.step_s for step in status.recent_steps[-WINDOW:]]
    return max(QUIET_S, QUIET_STEPS * sum(seconds) / len(seconds)) if seconds else QUIET_S


def _no_learner(status: RunStatus, progress: StepProgress) -> Bottleneck | None:
    if progress.has_learner:
        return None
    last = f"the run's last batch, weights or claim is {progress.quiet_s:.0f} s old"
    if not (status.workers or status.scorers or status.pools):
        text = (
            f"Neither a learner nor workers give a sign of life, and {last}. If they have ended, start the learner"
            " again with --resume. If they are stopped or do not reach the server, they go on once that is mended. Or"
            " the server takes no writes, as on a full disk: make room, and they go on."
        )
        return _because("no learner", text, status, progress, who="nobody")
    text = (
        f"The learner does not answer: it gives no sign of life, and {last}. The workers wait for it. If its process"
        " has ended, start it again with --resume. If it is stopped, hangs or does not reach the server, it goes on"
        " once that is mended."
    )
    return _because("no learner", text, status, progress, who="workers")


def _no_scorers(status: RunStatus, progress: StepProgress) -> Bottleneck | None:
    """Samples wait for a scorer of which no process can answer."""
    ready = {scorer.scorer for scorer in status.scorers if scorer.state == "ready"}
    asked = [queue for queue in status.scoring if queue.waiting + queue.leased and queue.scorer not in ready]
    if not asked or _has_enough(progress, status):
        return None
    told = "; ".join(_missing_scorer(queue, status) for queue in asked)
    return _because("no scorers", f"The workers wait for scores: {told}.", status, progress, who="workers")


def _missing_scorer(queue: ScoringQueue, status: RunStatus) -> str:
    samples = f"{_many(queue.waiting + queue.leased, 'sample')}, the oldest for {_seconds(queue.oldest_s)},"
    if any(scorer.scorer == queue.scorer for scorer in status.scorers):
        return f"{samples} for {queue.scorer}, whose processes are loading its model or leaving"
    pool = next((pool for pool in status.pools if pool.pool == f"{POOL}{queue.scorer}"), None)
    remedy = _shortage(pool) if pool is not None else f"start some with `headway scorers --scorer {queue.scorer}`"
    return f"{samples} for {queue.scorer}, of which no process is alive ({remedy})"


def _no_weights(status: RunStatus, progress: StepProgress) -> Bottleneck | None:
    announced, since = status.announced, _seconds(progress.claimed_s)
    if announced is None:
        text = f"The workers wait for the first weights: the learner took the run {since} ago, and prepares them."
    elif announced.incarnation < status.incarnation:
        text = (
            f"The workers wait for weights of the new learner: it took the run over {since} ago, and repeats the steps"
            " that its checkpoint does not contain."
        )
    else:
        return None
    return _because("no weights", text, status, progress, who="workers")


def _training(status: RunStatus, progress: StepProgress) -> Bottleneck | None:
    taken = progress.taken
    is_whole = progress.taken_groups >= progress.groups_per_step or progress.feed_is_closed
    if taken is None or taken < _next_step(status) or not is_whole:
        return None
    trains = f"the learner has trained step {taken + 1} for {_seconds(progress.taken_s)}"
    if not status.workers:
        return _because("training", f"No worker is alive, and {trains}.", status, progress, who="nobody")
    if lack := _what_workers_lack(status, progress):
        return _because("training", f"The workers wait: {lack}, and {trains}.", status, progress, who="workers")
    text = f"No process waits: {trains}, and the workers generate for later steps."
    return _because("training", text, status, progress, who="nobody")


def _what_workers_lack(status: RunStatus, progress: StepProgress) -> str:
    """Returns why the workers have nothing to lease; "" where they have."""
    if status.queues.retry:
        return ""
    if not status.queues.pool:
        return "no prompts are left"
    if progress.stored_bytes >= progress.max_bytes:
        return f"the store is full ({_store(progress)})"
    # an index counts admissions less drops; see broker/scripts/leases.lua
    index = status.queues.admitted - status.queues.dropped_stale - status.queues.uninformative
    if is_in_reach(index, _next_step(status), progress.ahead, progress.groups_per_step):
        return ""
    key = "max_lag" if progress.ahead == progress.max_lag else "ahead"
    return f"all admitted groups are ready or leased (staleness.{key} is {progress.ahead:g})"


def _no_prompts(status: RunStatus, progress: StepProgress) -> Bottleneck | None:
    queues = status.queues
    if queues.pool or queues.retry or queues.leased or progress.unfinished or _has_enough(progress, status):
        return None
    text = f"{_waits(status)}: no prompts are left, and {_ready(status, progress)}."
    return _because("prompts", text, status, progress)


def _store_is_full(status: RunStatus, progress: StepProgress) -> Bottleneck | None:
    if progress.stored_bytes < progress.max_bytes or _has_enough(progress, status):
        return None
    text = f"{_waits(status)}: the store is full ({_store(progress)}), and {_ready(status, progress)}."
    return _because("store", text, status, progress)


def _no_workers(status: RunStatus, progress: StepProgress) -> Bottleneck | None:
    if status.workers or _has_enough(progress, status):
        return None
    pools = [_shortage(pool) for pool in status.pools if not pool.pool.startswith(POOL)]
    pools = pools or ["start some with `headway workers`"]
    text = f"{_waits(status)}: no worker is alive ({'; '.join(pools)}), and {_ready(status, progress)}."
    return _because("no workers", text, status, progress)


def _shortage(pool: PoolInfo) -> str:
    if not pool.wanted:
        return f"pool {pool.pool} wants none: `headway scale 1 --pool {pool.pool}` starts one"
    given_up = f", and gave {pool.given_up} of another version up" if pool.given_up else ""
    return f"pool {pool.pool} wants {pool.wanted} and starts {pool.restarting} again{given_up}"


def _workers_pause(status: RunStatus, progress: StepProgress) -> Bottleneck | None:
    if _has_enough(progress, status):
        return None
    reasons = [_pause(worker, status) for worker in status.workers]
    if not all(reasons):
        return None
    counts = Counter(reasons)
    told = "; ".join(f"{count} {reason}" for reason, count in counts.most_common(MOST_HOLDERS))
    text = f"{_waits(status)}: none of the {_many(len(reasons), 'worker')} generates ({told})."
    return _because("workers pause", text, status, progress, workers=[w.worker for w in status.workers][:MOST_HOLDERS])


def _pause(worker: WorkerInfo, status: RunStatus) -> str:
    """Returns why this worker generates nothing; "" where it generates or could."""
    error = f": {worker.last_error[:_ERROR_CHARACTERS]}" if worker.last_error else ""
    if worker.worker in status.quarantined:
        return "quarantined, as its samples were refused"
    if worker.state in ("generating", "idle"):
        return ""
    meaning = {
        "starting": "starting, without weights yet",
        "paused": "paused, until it has a whole version",
        "asleep": "asleep, as the learner has their device",
        "draining": "leaving",
    }
    return meaning.get(worker.state, worker.state) + error


def _enough(status: RunStatus, progress: StepProgress) -> Bottleneck | None:
    """The groups are there and the learner has not taken them."""
    if not _has_enough(progress, status):
        return None
    group = next(iter(progress.unfinished), None)
    youngest = progress.youngest_floor
    holds_back = group is not None and group.floor is not None and youngest is not None and group.floor < youngest
    if group is None or not holds_back or progress.on_straggler != "wait":
        text = f"{_ready(status, progress)}. The learner has not taken them: it checkpoints, evaluates or publishes."
        return _because("learner busy", text, status, progress, who="workers")
    text = (
        f"{_waits(status)}: {_ready(status, progress)}, but an older group is unfinished and would exceed"
        f" staleness.max_lag. {_chain(group, status)}."
    )
    return _because("stragglers", text, status, progress, group=group.group, workers=_holders(group))


def _groups(status: RunStatus, progress: StepProgress) -> Bottleneck:
    group = next(iter(progress.unfinished), None)
    if group is None:
        text = f"{_waits(status)}: {_ready(status, progress)}, and the workers have begun no other."
        return _because("groups", text, status, progress)
    others = max(0, status.queues.open - 1)
    oldest = f" It is the oldest of {others + 1} unfinished groups." if others else ""
    text = f"{_waits(status)}: {_ready(status, progress)}. {_chain(group, status)}.{oldest}"
    return _because("groups", text, status, progress, group=group.group, workers=_holders(group))


_RULES: tuple[Rule, ...] = (
    _no_learner,
    _no_scorers,
    _no_weights,
    _training,
    _no_prompts,
    _store_is_full,
    _no_workers,
    _workers_pause,
    _enough,
    _groups,
)


def _next_step(status: RunStatus) -> int:
    return status.announced.step if status.announced is not None else 0


def _waits(status: RunStatus) -> str:
    return f"The learner waits for step {_next_step(status) + 1}"


def _has_enough(progress: StepProgress, status: RunStatus) -> bool:
    return status.queues.ready >= progress.groups_per_step


def _ready(status: RunStatus, progress: StepProgress) -> str:
    return f"{min(status.queues.ready, progress.groups_per_step)} of {progress.groups_per_step} groups are ready"


def _store(progress: StepProgress) -> str:
    return f"{progress.stored_bytes / 1e6:,.1f} of {progress.max_bytes / 1e6:,.1f} MB, broker.max_bytes"


def _chain(group: UnfinishedGroup, status: RunStatus) -> str:
    """Returns which samples the group lacks, and who has them."""
    lacks = f"Group {group.group} lacks {group.size - group.done} of {_many(group.size, 'sample')}"
    parts = list(_holdings(group.missing, status))
    return (
        f"{lacks}, {parts[0][1]}" if len(parts) == 1 else f"{lacks}: " + "; ".join(f"{n} {text}" for n, text in parts)
    )


def _holdings(missing: Sequence[MissingSample], status: RunStatus) -> Iterator[tuple[int, str]]:
    """Yield how many samples each worker has, with what is known of it; the workers with the most samples first."""
    alive = {worker.worker: worker for worker in status.workers}
    ended = {name for name, silence in status.silences.items() if silence.has_ended}
    held = Counter(sample.holder if sample.is_leased else "" for sample in missing)
    for holder, count in held.most_common(MOST_HOLDERS):
        if not holder:
            yield count, "not leased by any worker now"
            continue
        quiet_s = min(sample.held_s for sample in missing if sample.holder == holder)
        worker = None if holder in ended else alive.get(holder)
        yield count, f"leased by worker {holder}{_doing(worker, quiet_s)}"


def _doing(worker: WorkerInfo | None, quiet_s: float) -> str:
    """Returns what a worker does; None: it is dead."""
    if worker is None:
        return (
            f", which is not alive and sent nothing for {_seconds(quiet_s)}: another worker gets them once its"
            " supervisor hands them back, or the lease has expired"
        )
    where = f" on host {worker.host[:_HOST_CHARACTERS]}"
    if worker.silent_s >= SILENT_S:
        return f"{where}, whose engine has made no token for {_seconds(worker.silent_s)}"
    if worker.state != "generating":
        return f"{where}, which is {worker.state}"
    return f"{where}, whose engine makes {worker.tokens_per_s:,.0f} tokens/s"


def _holders(group: UnfinishedGroup) -> list[str]:
    return sorted({sample.holder for sample in group.missing if sample.is_leased and sample.holder})


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds < 600 else f"{seconds / 60:,.0f} min"


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
