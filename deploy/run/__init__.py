"""A run's directory: its files, the process that holds it, and how it is read again.

    learner, stage ─ events.py ─► report.py, stage_record.py ─► metrics.jsonl, summary.json, ...
                                        │
    directory.py, in_use.py             ▼
    one run, one directory       record.py ─► figures.py, history.py, samples.py ─► plots.py, comparison.py

    trained.py, stage_output.py    the models that a run has left
    answers.py                     the file of a batch inference
    resuming.py                    the keys that a resumed run may change
    whole_files.py                 writes a file whole or not at all

The invariant: two processes never write one run's files, and a crash at any time leaves files that are read again.
"""
