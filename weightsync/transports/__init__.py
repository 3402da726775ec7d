"""How bytes travel: broadcast to a group that formed in a rendezvous, or pull over HTTP.

    rendezvous, store            a group forms by words in the broker; torch's own go the same way
    forming > collective, ipc    what a group sends through; deafness closes gloo's port once it is formed
    pull_server > requests > visits, listening, certificate     what the learner serves to those who pull (`pull.py`)

Invariant: the learner listens at one port of ours, where it is told and nowhere else; who has not shown the run's
secret there gets nothing, and keeps nobody else out. What torch opens for a group (gloo, NCCL) has no such guard.
"""
