"""The experience stream and the run's shared state, in a real server (Valkey or Redis).

    prompts ─feed─► pool ─admit─► open ─submit─► ready ─take─► pinned ─commit─► settled
                                  ▲  │ leases      │             │
                                  └──┴── expire, release (with segments), requeue, reject

The learner owns the run (`batches.claim`), feeds prompts, takes a step's groups and commits them once a
checkpoint that contains the step is durable. Workers lease samples, append segments, submit trajectories, and
may come and go at any time. Lag is bounded here, in integers (`staleness`, `scripts/lease.lua`, `scripts/take.lua`).

    leases, submissions, unconfirmed, blobs
                                     what workers say      keys, schema, codec   what lies in the server, and how
    batches, prompts, versions       what the learner says scripts/              what the server does, verb by verb
    meetings                         how broadcast groups form
    strays                           what nobody needs, and is freed
    turns                            who swaps weights     access                what each role may do
    phases                           whose the device is
    status, usage                    what is looked at
    connection > routes > round_trips > driver, address, sharing: how the server, or cluster, is reached

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
