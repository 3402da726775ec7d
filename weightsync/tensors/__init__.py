"""A version's tensors as bytes: in buckets, staged, fingerprinted, as differences, landed again.

    learner   named tensors ─► staging.py ─► buckets.py ─► sent
                                   └─► deltas.py: what has changed since a version, and the chain of these
    worker    received ─► memory that is used again (`weightsync/deliveries.py`) ─► views of buckets: named tensors

    fingerprint.py          sums that two ends compare; fingerprint_kernel.py computes them on a GPU
    shared_memory.py        buffers that several processes of one machine map

Nothing here knows a broker, a transport or an engine.

The invariant: bytes become tensors again bit for bit, and two ends with equal fingerprints hold the same elements, up
to a collision of 64 bits.
"""
