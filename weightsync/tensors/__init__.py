"""A version's tensors as bytes: in buckets, staged, fingerprinted, as differences, landed again.

    learner   named tensors ─► gathering.py ─► staging.py ─► buckets.py ─► sent
                                                   └─► chain.py ─► deltas.py: what has changed since a version
    worker    received ─► landing.py: memory that is used again ─► views of buckets: named tensors

    base_weights.py               the frozen weights that adapters change, fetched once
    fingerprint.py, row_sums.py   sums that two ends compare, computed on a CPU or a GPU
    shared_memory.py              buffers that several processes of one machine map

Nothing here knows a broker, a transport or an engine.

The invariant: bytes become tensors again bit for bit, and two ends with equal fingerprints hold the same elements, up
to a collision of 64 bits.
"""
