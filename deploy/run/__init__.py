"""A run's directory: its files, the process that holds it, and how it is read again.

    learner, stage ─ events.py ─► record.py, stage_output.py ─► metrics.jsonl, summary.json, plots, ...
                                        │
    run_directory.py                    ▼
    one run, one directory       figures.py, samples.py ─► replays, pages, terminal

    agent_figures.py               figures of agents' episodes, of a step and of all workers
    stage_output.py                the models and records of stages without workers
    openenv_traces.py              trained episodes of agents as OpenEnv reads them
    resumable_keys.py              the keys that a resumed run may change

The invariant: two processes never write one run's files, and a crash at any time leaves files that are read again.
"""
