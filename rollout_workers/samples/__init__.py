"""One sample in a worker: generated, recorded token by token, saved in segments, held by a lease.

    leased_samples.py ──► episode.py ──► generation.py ──► recorder.py ──► trajectory ──► leased_samples.py
     renewed               turns          one turn of        │              submitted, durable
                                          an engine          └─► segments ─► broker

    leased_samples.py    the samples of held leases, how many at a time, and their submission
    episode.py           turns: generated, scored, answered by the environment; the seam for a tracer
    generation.py        a turn with one engine, whose requests are counted and whose failures are noted
    recorder.py          tokens, logprobs, version spans and the experts that a router chose; segments
    teacher_client.py    a teacher's logprobs of a finished sample

The invariant: every token has the logprob and the weight version with which it was sampled, whichever workers took
turns at its sample.
"""
