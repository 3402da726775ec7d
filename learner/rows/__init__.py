"""Sequences laid end to end: batches, their cost, and how they are packed into rows of tokens."""
