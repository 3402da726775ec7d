"""Sequences laid end to end: batches, their cost, and how they are packed into rows of tokens.

    trajectories ─► packing.py ──plan──► batch.py: rows of tokens, one for each micro-batch
                       ▲    └─ router_replay.py: the experts that a replayed router takes
    cost.py ───────────┘
    tree.py, clusters.py   tokens that sequences share; the sequences that are computed together for them, and units of
                           sequences that must stay together, such as pairs
    padding.py    positions of a row, padded to a few shapes, so that recorded kernels compute many

Objectives and backends read rows; the folder knows neither.

The invariant: every rank computes the same plan from the same sequences, and the loss mask of a row leaves out every
token beyond the bound on lag.
"""
