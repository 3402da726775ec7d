"""The learner's step of a small model on one GPU: where its time goes, and which of several ways is the fastest.

A model of 135M parameters computes a row of a few thousand tokens in about 20 ms, in which a process launches about a
thousand kernels. So the launches bound a step, and this measures them: `today.py` the backend as it is, `bare.py` the
same module without sharding, with and without CUDA graphs, `graphs.py` the backend's own graphs for rows of one padded
shape, `kernels.py` attention and the optimizer alone.
"""
