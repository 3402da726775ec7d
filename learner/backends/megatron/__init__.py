"""Megatron Core under any layout: tensor with sequence, pipeline, expert and context parallelism, sharded AdamW.

    backend.py       the calls of `learner/backends/base.py`      layout.py    which ranks hold what; refusals
    trained.py       their base: parts, one update, save and load
    schedule.py      micro-batches through the pipeline           row.py       one of them, as the layers take it
    model.py         this rank's part of the model                modules.py   attention, experts, norm
    architecture.py  which models fit                             optimizer.py gradient buffers, masters, moments
    mapping.py       Hugging Face tensors <-> parameters          shards.py    ... over the ranks
    source.py        first weights, one tensor at a time          export.py    weights by name, for engines and files
    state.py         checkpoints that any layout loads            cpu_shim.py  runs Megatron without CUDA
    replayed_router.py   experts that a batch says to take

The invariant: gradients, masters and moments are fp32. With `model.dtype: bfloat16` parameters are bf16, a critic's
head too.
"""
