"""The engine inside the worker's own process: a transformers model, sampled in one batch."""
