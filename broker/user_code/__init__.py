"""Code of the user's own: which of it may run here (`roots.py`).

Headway takes rewards, engines, prompt sources, losses and backends by import path, `package.module:name`. The
invariant: what a configuration that came over the network names is imported only from below the modules that this
process's own operator named, and never from the standard library.

It lies in the broker's room because workers and the learner both need it; it imports nothing of the rest but errors.
"""
