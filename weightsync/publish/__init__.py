"""The learner's side: a version offered, gathered, broadcast to the current group, announced.

    publisher.py ──► membership.py     heartbeats ─► the members of the next epoch
         │
         └────────► sender.py          an epoch's group: formed, sent to, left by members that do not answer
                      └─► resting.py   how long members that cannot connect are left to pull

The publisher drives the parts below `weightsync/`: tensors as buckets, transports, archives, pulls.

The invariant: the learner waits for no worker beyond a deadline. A broadcast that fails costs its deadline, is told as
a text, and leaves its workers to pull the version.
"""
