"""Transports of bytes: broadcast to a group that was formed in a rendezvous, and pull over HTTP.

    rendezvous                     a group forms by messages in the broker; torch's own go the same way
    broadcast > collective, ipc    a group is formed, and buckets are sent through it; a filter drops new connections to
                                   gloo's port once its group is formed
    http_pull > http_connections   the learner serves workers that pull; certificate: its TLS
    base, addresses                the seams, what each transport can do; the address at which the learner listens
    threads                        blocking calls of coroutines, each with a time limit

Invariant: Headway's own code listens at one port of the learner, at the configured address and no other. A client that
has not shown the run's secret there gets nothing and keeps no worker out. The ports that torch opens for a group (gloo,
NCCL) have no such guard.
"""
