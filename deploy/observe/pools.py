"""Which of a run's pools a user means."""

from broker.errors import RunNotFoundError
from broker.schema import PoolInfo, RunStatus
from deploy.recipe.scorers import POOL


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


def _workers(pool: PoolInfo) -> str:
    """Returns the name of a pool of workers, and nothing for a scorer's pool."""
    return "" if pool.pool.startswith(POOL) else pool.pool
