"""The work of each process: what it opens, in which order, and how it ends."""
