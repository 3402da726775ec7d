"""Code of the user's own: checks that it may run and fits its seam (`import_paths.py`, `kinds.py`), and processes that
can be killed for code that may hang.

    pool ── call, deadline ──► shared hosts ── raised, late, or gone? ──► once more, alone in a host ──► UserCodeError
                               (many calls each)                          (one call at a time)

A host (`host.py`) is a process that has opened one program, such as a reward function, before it is needed. If a call
hangs or ends it, it is killed and replaced. All calls that were in it are made once more, one by one in a host of
their own, so that only the call at fault fails (`pool.py`). Output of user code goes to stderr.

Invariants: no call outlives its deadline, nor the process that made it; a name in a configuration from the network is
imported only from below the modules that this process's own operator named, never from the standard library.

It lies in the broker's room because workers and the learner both need it; of that room it imports only errors.
"""
