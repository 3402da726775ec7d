"""Transports of bytes: broadcast to a group that was formed in a rendezvous, and pull over HTTP.

    rendezvous, store            a group forms by words in the broker; torch's own go the same way
    forming > collective, ipc    what a group sends through; deafness closes gloo's port once it is formed
    pull_server > requests > visits, listening, certificate     the learner serves workers that pull (`pull.py`)

Invariant: Headway's own code listens at one port of the learner, at the configured address and no other. A client that
has not shown the run's secret there gets nothing and keeps no worker out. The ports that torch opens for a group (gloo,
NCCL) have no such guard.
"""
