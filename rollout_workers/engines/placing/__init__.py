"""Tensors of a version on their way into the memory that an engine computes with."""
