"""The broker's costs, against the other ways of moving trajectories from one process to another.

    __main__ ─┬─► race.py ─► two processes: a producer of 64 coroutines, a consumer ─► transports.py
              ├─► workers.py    lease and take with up to a thousand workers
              └─► memory.py     what stays after a million prompts

`load.py` has trajectories of a given size, and the loops of learner and worker without training and without an engine.
Every transport moves the same trajectories, from arrays to arrays: encoding and decoding count for all alike. A lap
ends when the last trajectory has arrived, and every lap checks that each arrived exactly once.
"""
