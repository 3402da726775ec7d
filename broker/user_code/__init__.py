"""Code of the user's own: which of it may run (`roots.py`), whether it offers what its seam promises (`own.py`), and
where it runs, if it may hang: in processes that can be killed.

    pool ── call, deadline ──► shared hosts ── raised, late, or gone? ──► once more, alone in a host ──► UserCodeError
                               (many calls each)                          (one call at a time)

A host (`host.py`) is a process that opened one program, such as a reward function, before it is needed. One that a
call has hung or ended is killed and replaced (`host_process.py`); all calls that were in it are made once more, one by
one in a host of their own, so that only the one that is to blame fails (`pool.py`). What user code prints goes to our
stderr.

Invariants: no call outlives its deadline, nor the process that made it; what a configuration from the network names is
imported only from below the modules that this process's own operator named, never from the standard library.

It lies in the broker's room because workers and the learner both need it; it imports nothing of the rest but errors.
"""
