"""Is a worker fit to generate? Its engine hangs, fails again and again, or makes fewer tokens than others do.

    rules.py   the rules: figures in, a verdict with its reason out
    own.py     the figures that a worker collects of its own engine

Its supervisor collects the figures of `slow` and `silent` (`deploy/launch/pool_reports.py`).

The invariant: a worker is judged by itself or by its own supervisor, never by another worker. So a process with a
worker's password can have no process set aside but itself.
"""
