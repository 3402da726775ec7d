"""Rollout workers: lease prompts, generate, score, submit; take new weights mid-sentence.

     broker ──lease──► worker ──request──► engine (`engines/`: embedded, vLLM)
       ▲ ▲               │ ▲                  ▲
       │ │               │ └─ chunks of one   │ swap between two decoding steps, verified
       │ │               │    version each    │
       │ │               ▼                    │
       │ └──segments─ recorder (spans)      weights ◄── weightsync
       │                 ▼
       └───trajectory─ rewards (`rewards/`: built in, your function, a weighted sum)

`worker.py` is the loop: refresh weights -> lease -> generate -> score -> submit. `weights.py` is where
weights are swapped and verified, `turns.py` when, `generation.py` where a sample goes on after an
interruption or another worker's segments, `recorder.py` where tokens get their version spans,
`chosen_experts.py` where they keep the experts that the learner is to replay, `segments.py` where they are
stored while the sample grows, `held_leases.py` where leases are renewed and handed back, `gpus.py` which
GPUs a worker gets, `colocation.py` when its engine leaves them to the learner, `evaluate.py` measures the pass rate.

The invariant: every stored token carries the version of the weights that sampled it, and those weights were
verified. A worker keeps little that matters: kill it, and another goes on with its samples from their last
segments.
"""
