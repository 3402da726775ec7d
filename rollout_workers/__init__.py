"""Rollout workers: lease prompts, generate, score, submit; take new weights mid-sentence.

     broker ──lease──► worker ──request──► engine (`engines/`: embedded, vLLM)
        ▲                │ ▲                  ▲
        │                │ └─ chunks of one   │ swap between two decoding steps, then verify
        │                │    version each    │
        │                ▼                    │
        │            recorder (spans)      weights ◄── weightsync
        │                ▼
        └──trajectory─ rewards (`rewards/`: built in, your function, a weighted sum)

`worker.py` is the loop: refresh weights -> lease -> generate -> score -> submit. `weights.py` is where
weights are swapped and verified, `recorder.py` where tokens get their version spans, `held_leases.py` where
leases are renewed and handed back, `evaluate.py` measures the pass rate.

The invariant: every submitted token carries the version of the weights that sampled it, and those weights
were verified. A worker keeps nothing that matters: kill it, and its leases go to another.
"""
