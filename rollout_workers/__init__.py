"""Rollout workers lease prompts, generate, score and submit, and take new weights in mid-sentence.

     broker ──lease──► worker ──request──► engine (`engines/`: embedded, vLLM)
       ▲ ▲               │ ▲                  ▲
       │ │               │ └─ chunks of one   │ swap between two decoding steps, verified
       │ │               │    version each    │
       │ │               ▼                    │
       │ └──segments─ recorder (spans)      swaps/ ◄── weightsync
       │                 ▼
       └───trajectory─ rewards (`rewards/`: built-in ones, your own, a weighted sum)

    worker.py       the loop: refresh weights -> lease -> generate, score and answer turns -> submit
    evaluate.py     the pass rate on held-out prompts, in the process that asks for it
    samples/        one sample: played turn by turn, recorded with version spans, saved in segments, held by a lease;
                    a worker's part in evaluations beside training
    swaps/          new weights in a running engine: their turn, their verification, and the use of the device
    health/         whether this worker is fit to generate
    engines/        turn prompts into tokens; `engines/base.py` is the seam
    rewards/        score responses; `rewards/base.py` is the seam
    scorers/        models in processes of their own that score responses: reward models and teachers
    environments/   end an episode after a turn, or say what the model reads next; `environments/base.py` is the seam
    outages.py, run_end.py      a worker while the broker is away, and when its run has ended
    config.py, model_files.py, decoding.py   the user's settings; the model without its weights; tokens as text

The invariant: every stored token carries the version of the weights that sampled it, and those weights were
verified. If a worker is killed, another one continues its samples from their last segments.
"""
