"""Finds the pool of a run that a user means, and the workers of a pool."""

from collections.abc import Iterable

from headway.broker.errors import RunNotFoundError
from headway.broker.schema.status import PoolInfo, RunStatus, WorkerInfo
from headway.deploy.recipe.scorers import POOL
from headway.deploy.recipe.worker_pools import MAIN

UNNAMED = "worker"
"""The prefix of the workers of a pool without a name of its own."""
MOST_OF_PREFIX = 40
"""Characters of a pool's name in its workers' names, which have room for 100."""


def pool_of(status: RunStatus, name: str) -> PoolInfo:
    """Returns the pool of that name, or the run's only pool of workers where the name is empty. Raises
    RunNotFoundError."""
    found = [pool for pool in status.pools if (name or _workers(pool)) == pool.pool]
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


def _workers(pool: PoolInfo) -> str:
    """Returns the name of a pool of workers, and nothing for a scorer's pool."""
    return "" if pool.pool.startswith(POOL) else pool.pool
