"""Megatron Core under any layout: tensor with sequence, pipeline, expert and context parallelism, sharded AdamW.

    backend.py    the calls of `learner/backends/base.py`: the layout is joined, first weights are read, one update
    schedule.py   micro-batches through the pipeline      row.py       one of them, as the layers take it
    model.py      this rank's part of the model           modules.py   attention, experts, norm
    mapping.py    which models fit; Hugging Face tensors <-> parameters
    hugging_face.py   ... over the ranks; weights by name, for engines and files
    optimizer.py  gradient buffers, masters, moments; checkpoints that any layout loads
    adapter.py    low-rank changes of frozen weights      groups.py    this rank's process groups
    cpu_shim.py   runs Megatron without CUDA

The invariant: gradients, masters and moments are fp32. With `model.dtype: bfloat16` parameters are bf16, a critic's
head too.
"""
