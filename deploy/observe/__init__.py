"""A run as it is now, for a terminal, for metric sinks, for Prometheus, for a collector of traces and for a browser.

    the broker's status ─┬─ status_tables.py, live.py, run_warnings.py ─► terminal and log
                         ├─ bottleneck.py                        ─► the process that a run waits for
                         └─ page/                                ─► browser
    the learner's events ─── sinks/ ─► prometheus/
    a worker's samples ───── tracing/
    bounded_server.py        the HTTP server of all that people and Prometheus may look at

The invariant: training waits for no observer, and an observer writes nothing into a run.
"""
