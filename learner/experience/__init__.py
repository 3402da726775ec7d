"""The learner feeds prompts, takes the groups that workers made of them, and logs, replays or rewinds what it trains.

    cursor ─► stream.py ─► broker ─► stream.py ─► log.py ─► the step
                                        │            │
                                        │            └ log_files.py       files of many batches, a batch in a file
                                        ├ broker_retries.py      calls are repeated until the broker answers
                                        └ publication_state.py   replayed, published, announced
    length_drift.py   whether load drops long prompts

The invariant: a batch is in the log before it is trained, and is trained once in each lineage of checkpoints.
"""
