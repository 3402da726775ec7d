"""The experience stream and the run's shared state, in a real server (Valkey or Redis).

    prompts ─feed─► pool ─admit─► open ─submit─► ready ─take─► pinned ─commit─► settled
                                  ▲  │ leases      │             │
                                  └──┴── expire, release (with segments), requeue, reject

The learner owns the run, feeds prompts, takes a step's groups and commits them once a checkpoint that contains the
step is durable. Workers lease samples, append segments, submit trajectories, and may come and go at any time.

    schema/, keys.py        the contract: the structs that cross a process, and the keys in the server
    staleness.py            the bound on lag, in integers; scripts/leases.lua and scripts/batches.lua apply it
    config.py, errors.py    the settings; the errors
    security/               stands against hostile workers: sample validation, garbage collection
    wire/                   frames: structs and arrays as bytes and back, checked and bounded
    connection/             the connection to a server or cluster: address, routes, round trips, outages
    client/                 the verbs: leases and submissions of workers, batches and versions of the learner,
                            evaluations and scoring work, which are no part of the experience stream, ...
    scripts/                the server's side of the verbs, a Lua file for each noun
    server/                 the embedded server, and which user of any server may do what
    user_code/              processes in which rewards, prompt sources and examples of the user's own run

Invariant: a trajectory is trained at most once within one lineage of checkpoints, and exactly once unless it
was dropped by a stated rule and counted. This room imports nothing of ours.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client.broker import BlockingBroker, Broker, open_broker

__all__ = ["BlockingBroker", "Broker", "open_broker"]


def __getattr__(name: str) -> Any:
    """The client is imported when first used: `broker.config` and `broker.errors` must cost nothing."""
    if name not in __all__:
        raise AttributeError(name)
    from .client import broker as client

    return getattr(client, name)
