"""Where a run's metrics go: one typed event for a step, an evaluation and a heartbeat, handed to any number of sinks.

    learner ─ event ─► Sinks ─┬─ jsonl        the run's record, written before the learner goes on
                              └─ queue ─► any other sink, in a thread of its own

The events are `deploy.run.events`, a sink is `base.MetricSink`. The invariant: the run's record is written whole or the
learner ends; whatever any other sink does, training goes on, and what that sink lost is counted.
"""
