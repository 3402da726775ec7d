"""One sample in a worker: generated, recorded token by token, kept in segments, held by a lease."""
