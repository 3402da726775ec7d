"""The learner feeds prompts, takes the groups that workers made of them, and logs, replays or rewinds what it trains.

    cursor ─► feed.py ─► broker ─► stream.py ─► log.py ─► the step
                                      │            │
                                      ├ waits.py   ├ segments.py                   files of many batches
                                      │            ├ logged_batch.py, frames.py    one batch in a file
                                      ├ outages.py └ rewind.py                     back to a checkpoint
                                      └ standing.py: replayed, published, announced
    drift.py   whether load drops long prompts

The invariant: a batch is in the log before it is trained, and is trained once in each lineage of checkpoints.
"""
