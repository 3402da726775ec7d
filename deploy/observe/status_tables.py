"""One snapshot of a run: versions, queue depths, workers, lag histogram and throughput, as tables or as JSON; and the
pool of it that a user means, with its workers.
"""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table

from headway.broker.errors import RunNotFoundError
from headway.broker.schema import WeightVersion
from headway.broker.schema.status import Fault, PoolInfo, QueueAges, QueueDepths, RunStatus, Tallies, WorkerInfo
from headway.broker.schema.step_metrics import StepMetrics
from headway.deploy.recipe.pools import MAIN, POOL
from headway.deploy.run.agent_figures import AgentsTogether, agents_together
from headway.deploy.run.figures import by_lag, generated_per_s, lag_histogram, trained_per_s
from headway.deploy.terminal import WordWrapTable, headed_table

from .bottleneck import Bottleneck

RECENT_STEPS = 20
"""Steps over which throughput and lag are computed."""
BAR_WIDTH = 20
SUSPICIOUS_WORKERS = 3
"""Workers with refused samples that raise suspicion. A broken worker and its replacement are only two."""


def version_text(version: WeightVersion | None) -> str:
    """Return incarnation and step such as `1.37`, or a dash before the first weights."""
    return "-" if version is None else str(version)


def recent(status: RunStatus) -> tuple[StepMetrics, ...]:
    """Return the last steps, oldest first."""
    return status.recent_steps[-RECENT_STEPS:]


def status_json(status: RunStatus, waiting: Bottleneck | None = None) -> dict[str, Any]:
    """Return all of RunStatus without the history of steps, with the sums that the tables show, and who waits."""
    plain: dict[str, Any] = msgspec.to_builtins(status, str_keys=True)
    del plain["recent_steps"]
    plain["announced"] = version_text(status.announced)
    plain["workers"] = [worker | plain["silences"].get(worker["worker"], {}) for worker in workers_json(status.workers)]
    del plain["silences"]
    plain["lag_histogram"] = {str(lag): count for lag, count in lag_histogram(recent(status)).items()}
    plain["by_lag"] = msgspec.to_builtins(by_lag(recent(status)), str_keys=True)
    plain["throughput"] = {
        "generated_tokens_per_s": generated_per_s(status.workers),
        "trained_tokens_per_s": trained_per_s(recent(status)),
    }
    if (agents := agents_together(status.workers)) is not None:
        plain["agents"] = msgspec.to_builtins(agents)
    plain["waiting"] = msgspec.to_builtins(waiting)
    return plain


def workers_json(workers: Sequence[WorkerInfo]) -> list[dict[str, Any]]:
    """Return the reports of workers, with their versions as text."""
    plain: list[dict[str, Any]] = msgspec.to_builtins(workers, str_keys=True)
    return [worker | {"version": version_text(info.version)} for worker, info in zip(plain, workers, strict=True)]


def status_tables(status: RunStatus, waiting: Bottleneck | None = None) -> RenderableType:
    """Return the same as tables for people."""
    before = [_head(status, waiting), _queues(status.queues, status.ages), _lengths(status.tallies)]
    if status.pools:
        before.append(_pools(status.pools))
    after = [_lags(status)]
    if status.scorers or status.scoring:
        after.insert(0, _scorers(status))
    if (agents := agents_together(status.workers)) is not None:
        after.insert(0, _agents(agents))
    if status.faults:
        after.append(_faults(status.faults))
    if status.quarantined or status.dead_letters:
        after.append(_refused(status))
    workers = WordWrapTable(_workers(status), wider=_workers(status, has_processes=True))
    return Group(*map(WordWrapTable, before), workers, *map(WordWrapTable, after))


def _head(status: RunStatus, waiting: Bottleneck | None) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    step = status.last_step
    table.add_row("run", f"{status.run}: {status.state}, incarnation {status.incarnation}")
    table.add_row("weights", f"version {version_text(status.announced)} announced")
    if step is not None:
        table.add_row("step", f"{step.step + 1} of {step.total_steps}, reward {step.reward_mean:.3f}")
    table.add_row(
        "tokens/s",
        f"{generated_per_s(status.workers):,.0f} generated, {trained_per_s(recent(status)):,.0f} trained",
    )
    if skipped := status.queues.skipped_evaluations:
        table.add_row("evaluations", f"{skipped} skipped: no worker kept their weights until all samples were done")
    if waiting is not None:
        table.add_row("waits", waiting.text)
    return table


def _queues(queues: QueueDepths, ages: QueueAges) -> Table:
    headings = ("", "waiting", "generating", "ready", "taken", "dropped", "requeued")
    table = headed_table(title="Queues", numbers=headings)
    depths = (queues.pool, queues.open, queues.ready, queues.pinned, queues.dropped_stale, queues.requeued_stale)
    table.add_row("groups", *map(str, depths))
    table.add_row("samples", f"{queues.retry}", f"{queues.leased}", "", "", "", "")
    oldest = (ages.next_sample_s, ages.oldest_lease_s, ages.oldest_ready_s)
    table.add_row("oldest", *("" if age_s is None else f"{age_s:,.1f} s" for age_s in oldest), "", "", "")
    table.caption = (
        f"{queues.admitted} groups admitted, {queues.expired_leases} leases expired, {queues.fenced} late or"
        f" duplicate submissions refused, {queues.rejected} samples or prompts that cannot be,"
        f" {queues.payload_bytes / 1e6:,.1f} MB stored; {queues.resumed_tokens:,} tokens resumed from segments,"
        f" {queues.discarded_tokens:,} discarded, {queues.trimmed_samples} samples trimmed,"
        f" {queues.uninformative} groups dropped by dynamic sampling"
    )
    return table


def _refused(status: RunStatus) -> Table:
    """Return refused samples, segments and prompts, newest last, and the quarantined workers."""
    table = headed_table("sample", "from", "reason", title="Refused, and generated anew")
    for letter in status.dead_letters:
        table.add_row(letter.tid, letter.worker, letter.reason)
    captions = [f"No more leases for {', '.join(status.quarantined)}."] if status.quarantined else []
    table.caption = " ".join([*captions, *_suspicion(status)])
    return table


def _suspicion(status: RunStatus) -> Iterator[str]:
    """Yield a warning if samples of many workers were refused: a quarantine does not stop a worker that begins again
    under a new name each time."""
    if status.refused_workers >= SUSPICIOUS_WORKERS:
        yield (
            f"{status.refused_lately} samples from {status.refused_workers} workers were refused within a minute:"
            " unless their models, engines or versions of Headway are not the learner's, the worker's password is in"
            " wrong hands. Change it. The embedded server: stop it, delete passwords/worker in its directory, start it"
            " again. Another server: `headway acl`."
        )


def _faults(faults: tuple[Fault, ...]) -> Table:
    title = "Workers that were set aside in the last hour"
    table = headed_table("worker", "host", "at", "rule", "why", title=title)
    for fault in faults:
        at = time.strftime("%H:%M:%S", time.localtime(fault.at))
        table.add_row(fault.worker, fault.host, at, fault.rule, fault.reason)
    return table


def _lengths(tallies: Tallies) -> Table:
    """Return begun and trained groups by length of the prompt, which shows whether training loses some lengths."""
    table = headed_table(title="Groups by length of the prompt", numbers=("tokens up to", "begun", "trained"))
    for length, begun in tallies.dispatched_by_prompt_length.items():
        table.add_row(f"{length}", f"{begun:,}", f"{tallies.trained_by_prompt_length.get(length, 0):,}")
    return table


def _pools(pools: tuple[PoolInfo, ...]) -> Table:
    headings = ("wanted", "running", "leaving", "restarting", "given up")
    table = headed_table("pool", "host", title="Pools", numbers=headings)
    for pool in pools:
        numbers = (pool.wanted, pool.running, pool.leaving, pool.restarting, pool.given_up)
        table.add_row(pool.pool, pool.host, *map(str, numbers))
    return table


def state_text(info: WorkerInfo, status: RunStatus) -> str:
    """Return a worker's state: as it said itself, unless it is silent or its supervisor saw it end."""
    silence = status.silences.get(info.worker)
    if silence is None or not (silence.has_ended or silence.is_late):
        return info.state
    return "dead: its process ended" if silence.has_ended else f"not heard of for {silence.heard_s:.0f} s"


def _workers(status: RunStatus, *, has_processes: bool = False) -> Table:
    """Return the workers, with `has_processes` also the host and the id of each one's process."""
    texts = ("worker", *(("host", "pid") if has_processes else ()), "engine", "state")
    numbers = ("version", "leases", "tokens/s", "sent")
    table = headed_table(*texts, title=f"Workers ({len(status.workers)})", numbers=numbers)
    for info in status.workers:
        table.add_row(
            info.worker,
            *((info.host, f"{info.pid}") if has_processes else ()),
            info.engine,
            state_text(info, status) + (f": {info.last_error}" if info.last_error else ""),
            version_text(info.version),
            f"{info.active}/{info.capacity}",
            f"{info.tokens_per_s:,.0f}",
            f"{info.submitted:,}",
        )
    return table


def _scorers(status: RunStatus) -> Table:
    """Return the processes of each scorer, and what waits for them."""
    texts, title = ("scorer", "process", "host", "state"), f"Scorers ({len(status.scorers)})"
    table = headed_table(*texts, title=title, numbers=("held", "scored", "tokens/s"))
    for info in status.scorers:
        state = info.state + (f": {info.last_error}" if info.last_error else "")
        numbers = (f"{info.held}", f"{info.scored:,}", f"{info.tokens_per_s:,.0f}")
        table.add_row(info.scorer, info.process, info.host, state, *numbers)
    table.caption = "; ".join(
        f"{queue.scorer}: {queue.waiting} samples wait, {queue.leased} are held, the oldest for {queue.oldest_s:.1f} s,"
        f" {queue.answered:,} answered, {queue.failed} failed"
        for queue in status.scoring
    )
    return table


def _agents(agents: AgentsTogether) -> Table:
    """Return what all workers report of the episodes that agents play."""
    headings = ("open", "requests running", "waiting for tools", "finished", "turns each", "tool s a turn")
    table = headed_table(title="Agents' episodes", numbers=(*headings, "forks", "tokens re-read"))
    counts = (agents.episodes, agents.running_requests, agents.waiting_for_tools, agents.finished)
    means = ("-" if mean is None else f"{mean:,.2f}" for mean in (agents.turns_per_episode, agents.tool_s_per_turn))
    shares = ("-" if share is None else f"{share:.1%}" for share in (agents.fork_fraction, agents.reread_fraction))
    table.add_row(*(f"{count:,}" for count in counts), *means, *shares)
    captions = [
        f"{agents.unseen_turns:,} turns unseen, {agents.resumed_calls:,} calls resumed, {agents.repeated_calls:,}"
        f" repeated, {agents.lost_calls:,} lost, {agents.over_budget:,} over budget, {agents.turn_timeouts:,} over"
        f" agent.turn_s, {agents.restarted:,} episodes restarted"
    ]
    for what, found in (("failed", agents.failures), ("calls refused", agents.refused_calls)):
        if found:
            captions.append(f"{what}: {', '.join(f'{count:,} {reason}' for reason, count in found.items())}")
    table.caption = "; ".join(captions)
    return table


def _lags(status: RunStatus) -> Table:
    """Return what the last steps trained in each bucket of lag, which is named by its largest lag."""
    found = by_lag(recent(status))
    largest = max((figures.trajectories for figures in found.values()), default=0) or 1
    headings = ("lag", "trajectories", "reward", "ESS", "clipped", "masked")
    table = headed_table(title=f"Lag of what the last {len(recent(status))} steps trained", numbers=headings)
    table.add_column("", min_width=BAR_WIDTH)
    for lag, figures in found.items():
        numbers = (figures.reward_mean, figures.ess, figures.clip_fraction, figures.mask_fraction)
        bar = "█" * math.ceil(BAR_WIDTH * figures.trajectories / largest)
        table.add_row(f"{lag}", f"{figures.trajectories:,}", *("-" if n is None else f"{n:.3f}" for n in numbers), bar)
    return table


UNNAMED = "worker"
"""The prefix of the workers of a pool without a name of its own."""
MOST_OF_PREFIX = 40
"""Characters of a pool's name in its workers' names, which have room for 100."""


def pool_of(status: RunStatus, name: str) -> PoolInfo:
    """Returns the pool of that name, or the run's only pool of workers where the name is empty. Raises
    RunNotFoundError."""
    found = [pool for pool in status.pools if (name or _name_unless_scorers(pool)) == pool.pool]
    if len(found) == 1:
        return found[0]
    names = ", ".join(pool.pool for pool in status.pools)
    if found:
        raise RunNotFoundError(f"Run {status.run} has {len(found)} pools ({names}): name one with --pool.")
    if names:
        raise RunNotFoundError(f"Run {status.run} has no pool {name}. Its pools: {names}.")
    raise RunNotFoundError(
        f"No supervisor of a pool is alive in run {status.run}: start workers with `headway run` or `headway workers`."
    )


def workers_of(status: RunStatus, pool: PoolInfo) -> tuple[WorkerInfo, ...]:
    """Returns the workers of the pool, told by their names, which are HOST-PREFIX-NUMBER-TAG. A name that fits several
    pools is of the one with the longest prefix. Returns all workers of the run where none can be told."""
    pools = sorted((*status.pools, pool), key=lambda one: len(worker_prefix(one)), reverse=True)
    mine = worker_prefix(pool)
    found = tuple(info for info in status.workers if _prefix_in(info, map(worker_prefix, pools)) == mine)
    return found or status.workers


def worker_prefix(pool: PoolInfo) -> str:
    """Returns how the pool's workers are called: by its name, unless the pool has none of its own."""
    is_unnamed = pool.pool == MAIN or pool.pool.endswith(f"-{pool.pid}")
    return UNNAMED if is_unnamed else pool.pool[:MOST_OF_PREFIX]


def _prefix_in(info: WorkerInfo, prefixes: Iterable[str]) -> str:
    head = info.worker.rsplit("-", 2)[0]
    return next((prefix for prefix in prefixes if head.endswith(f"-{prefix}")), "")


def _name_unless_scorers(pool: PoolInfo) -> str:
    """Returns the name of a pool of workers, and nothing for a scorer's pool."""
    return "" if pool.pool.startswith(POOL) else pool.pool
