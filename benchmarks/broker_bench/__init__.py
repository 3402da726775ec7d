"""The broker's costs, against the other ways of moving trajectories from one process to another.

    broker.py ─► race.py ─► two processes: a producer of 64 coroutines, a consumer ─► transports/
             ├─► latency.py    lease and take with many workers
             ├─► wire.py       bytes per trajectory
             ├─► growth.py     speed while the number of payloads grows
             └─► targets.py    ratios within one run, and whether they are met

Every transport moves the same trajectories, from arrays to arrays: encoding and decoding count for all alike. A lap
ends when the last trajectory has arrived, and every lap checks that each arrived exactly once.
"""
