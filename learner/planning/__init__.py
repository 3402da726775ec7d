"""Estimates the memory that a recipe takes, before any process starts.

    recipe, shape of the model ─► memory.py ─► fsdp.py, megatron.py ─► the bytes of each rank

`memory.py` also estimates what is alike for every backend: activations, the output head and published versions; and the
memory of a model that only scores.

It reads shapes and layouts (`learner/models/`). A backend's abilities name the function that plans its ranks.

The invariant: planning reads no weights and allocates none. Parameters, gradients and moments are counted exactly but
for the padding of buffers; every other part of a plan says that it is an estimate.
"""
