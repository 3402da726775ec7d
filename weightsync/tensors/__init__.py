"""A version's tensors as bytes: in buckets, staged, fingerprinted, as differences, landed again."""
