"""One sample in a worker: generated, recorded token by token, saved in segments, held by a lease.

    held_leases.py ─► episode.py ─► generation.py ─► recorder.py ─► trajectory
    renewed, lost     turns         one turn          │    tokens, logprobs, versions
                                                      └─► segments.py ─► broker

    taught.py, chosen_experts.py     what a trajectory carries besides: a teacher's logprobs, the router's experts
    evaluating.py, held_out.py       samples of held-out prompts, which are never trained
    throughput.py, tracing.py        how fast, and when each phase began

The invariant: every token has the logprob and the weight version with which it was sampled, whichever workers took
turns at its sample.
"""
