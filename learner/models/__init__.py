"""A causal language model as every backend sees it: files, shape, layout over ranks, attention over packed rows."""
