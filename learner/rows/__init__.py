"""Sequences laid end to end: batches, their cost, and how they are packed into rows of tokens.

    trajectories ─► packing.py ──plan──► batch.py: rows of tokens, one for each micro-batch
                       ▲    └─ routing.py: the experts that a replayed router takes
    cost.py ───────────┘
    padding.py a few shapes of rows, so that recorded kernels compute many
    units.py   the same for sequences that must stay together, such as pairs

Objectives and backends read rows; the folder knows neither.

The invariant: every rank computes the same plan from the same sequences, and the loss mask of a row leaves out every
token beyond the bound on lag.
"""
