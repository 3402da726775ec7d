"""transformers models sharded by torch's `fully_shard`, at world size 1 and under torchrun.

    backend.py    policy and critic, and their base: forward, one update, save and load
    policy.py     packed batch ─► logprobs, or values; its layers: recomputation, compilation, fused norms
    row.py        packed batch ─► a rank's part of it, on its device; ranks that share a row's tokens
    sharding.py   shards, when they are gathered, their norm
    optimizer.py  AdamW, a single rank's rounded weights; parameters and moments to disk and back, bit for bit
    adapter.py    low-rank changes of frozen weights
    experts.py    how experts compute, and the experts that a batch says to take
    hugging_face.py   files ─► shards, a tensor at a time; shards ─► Hugging Face names
    cuda_graphs.py   kernels ─► a graph of each shape of rows, replayed for the others of it

The invariant: parameters, gradients and moments are fp32 shards over all ranks, which are plain tensors on a single CPU
in fp32, and on a single GPU that replays a policy's kernels. With `model.dtype: bfloat16` only the forward and backward
pass and what leaves the learner are rounded; a critic's head is not.
"""
