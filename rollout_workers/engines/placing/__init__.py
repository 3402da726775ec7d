"""The way of a version's tensors into the memory that an engine computes with."""
