"""transformers models sharded by torch's `fully_shard`, at world size 1 and under torchrun.

    backend.py    policy and critic       sharded_model.py   their base: forward, one update, save and load
    policy.py     packed batch ─► logprobs, or values        sharding.py   shards, when they are gathered, their norm
    row.py        packed batch ─► a rank's part of it, on its device
    context.py    ranks that share a row's tokens, and swap them for heads around attention
    layers.py     recomputation, compilation, fused norms    optimizer.py   AdamW, its moments in CPU memory if asked
    adapters.py   low-rank changes of frozen weights
    experts.py    how experts compute            replayed_router.py   experts that a batch says to take
    streaming.py  files ─► shards, a tensor at a time        export.py   shards ─► Hugging Face names and files
    rounded.py     one rank's weights, unsharded            recording.py   kernels ─► a CUDA graph
    replayed_rows.py    a graph of each shape of rows, replayed for the others of it
    training_state.py   parameters, moments and RNG to disk and back, bit for bit

The invariant: parameters, gradients and moments are fp32 shards over all ranks, which are plain tensors on a single CPU
in fp32, and on a single GPU that replays a policy's kernels. With `model.dtype: bfloat16` only the forward and backward
pass and what leaves the learner are rounded; a critic's head is not.
"""
