"""Traits of a server that users must know before they rely on it."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headway.broker.connection.address import without_password
from headway.broker.connection.inspection import inspect, may_work
from headway.broker.errors import BrokerError, BrokerUnavailableError, RefusedByServerError


@contextmanager
def unless_absent() -> Iterator[None]:
    """Leave the block where no server answers yet. Raises RefusedByServerError for one that answers and refuses us."""
    try:
        yield
    except RefusedByServerError:
        raise
    except BrokerUnavailableError:
        pass


def check_traits(url: str, say: Callable[[str], object], *, timeout_s: float) -> None:
    """Print what is risky about the server at `url`. Raises BrokerError if it would lose samples silently, and
    BrokerUnavailableError if it does not answer."""
    traits, shown = asyncio.run(inspect(url, timeout_s=timeout_s)), without_password(url)
    if traits.evictions:
        raise BrokerError(
            f"The server at {shown} throws keys away once its memory is full (maxmemory-policy"
            f" {', '.join(traits.evictions)}), and samples, leases and batches with them: set it to noeviction"
            " (`CONFIG SET maxmemory-policy noeviction`, and in its configuration)."
        )
    if traits.is_open:
        say(
            f"Warning: the server at {shown} asks for no password. Anything that reaches its port can write the"
            " configuration, prompts and weights of its runs. `headway acl` prints users for it, one for each role;"
            " `headway broker` starts a server that has them."
        )
    if traits.has_file is False:
        say(
            f"Warning: the server at {shown} keeps no append-only file: when it restarts, all that was generated and"
            " not yet trained is generated anew. `CONFIG SET appendonly yes` mends that, and the same in its"
            " configuration."
        )


def check_may_work(url: str, run: str, *, timeout_s: float) -> None:
    """Raise BrokerError where the URL's user is another role's and has no rights to a worker's samples, and
    BrokerUnavailableError where the server does not answer."""
    if not asyncio.run(may_work(url, run, timeout_s=timeout_s)):
        raise BrokerError(
            f"The user of {without_password(url)} may not do the work of run {run}'s workers. Is it another role's, or"
            " another run's? `headway broker` prints a line for each role: take the one of `headway workers`. Of your"
            " own server, name the user headway-worker and its password, and give it the rights that `headway acl` of"
            " this version prints."
        )
