"""One sample in a worker: generated, recorded token by token, saved in segments, held by a lease."""
