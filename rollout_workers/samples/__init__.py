"""One sample in a worker: generated, recorded token by token, saved in segments, held by a lease.

    leased.py ──► episode.py ─► engine_use.py ─► generation.py ─► recorder.py ─► trajectory ─► submissions.py
        │         turns         counted, judged   one turn          │                          handed in, durable
        └► held_leases.py: renewed, lost                            └─► segments.py ─► broker

    taught.py, chosen_experts.py     what a trajectory carries besides: a teacher's logprobs, the router's experts
    evaluating.py, held_out.py       samples of held-out prompts, which are never trained
    places.py                        how many at a time, where the recipe leaves it open
    throughput.py, tracing.py        how fast, and when each phase began

The invariant: every token has the logprob and the weight version with which it was sampled, whichever workers took
turns at its sample.
"""
