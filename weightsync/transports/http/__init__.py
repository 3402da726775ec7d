"""Pulls: the learner serves its versions over HTTPS, and workers fetch the versions that they missed.

    learner   server.py ─► connections.py               versions, and how long they are kept; a few threads that answer
    worker    client.py ──GET incarnation/step/bucket──►  both: certificate.py, which the manifest carries

The archives of versions (`weightsync/archives/`) answer the same questions without a learner.

The invariant: a client that has not shown the run's secret gets nothing and keeps no worker out, and a worker trusts no
certificate but that of the manifest.
"""
