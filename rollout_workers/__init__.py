"""Rollout workers lease prompts, generate, score and submit, and take new weights in mid-sentence.

     broker ──lease──► worker ──request──► engine (`engines/`: embedded, vLLM)
       ▲ ▲               │ ▲                  ▲
       │ │               │ └─ chunks of one   │ swap between two decoding steps, verified
       │ │               │    version each    │
       │ │               ▼                    │
       │ └──segments─ recorder (spans)   weight_updates/ ◄── weightsync
       │                 ▼
       └───trajectory─ rewards (`rewards/`: built-in ones, your own, a weighted sum)

    worker.py       the loop: refresh weights -> lease -> generate, score and answer turns -> submit
    evaluation.py   the pass rate on held-out prompts, in the learner's process or by workers beside training
    samples/        one sample: played turn by turn, recorded with version spans, saved in segments, held by a lease
    weight_updates/ new weights in a running engine: their turn, their verification, and the lock on the device
    health.py       when a worker ends: the rules by which it is unhealthy, and whether its run has ended
    engines/        turn prompts into tokens; `engines/base.py` is the seam
    rewards/        score responses; `rewards/base.py` is the seam
    scorers/        models in processes of their own that score responses: reward models and teachers
    agents/         programs with tools and state that talk to the model over several turns
    environments.py end an episode after a turn, or say what the model reads next; `Environment` is the seam
    config.py, model_download.py, decoding.py   the user's settings; the model without its weights; tokens as text

The invariant: every stored token carries the version of the weights that sampled it, and those weights were
verified. If a worker is killed, another one continues its samples from their last segments.
"""
