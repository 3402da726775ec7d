"""A causal language model as every backend sees it: its files, its shape, its layout over ranks."""
