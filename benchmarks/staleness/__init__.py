"""`make study-staleness SEEDS=3`: the cost of lag, and the gain of each correction, at lags that are exact.

    warm-up, once a seed ──start──► a run for each (composition, lag, seed), one process each
                                       step k:  weights max(0, k - lag) ──sample──► 32 prompts x 8
                                                weights k ──one update──► weights k + 1
                                       every tenth step: pass rate on held-out prompts
    runs.jsonl ──► table.md, one JSON object

The model, prompts, rewards, warm-up, sampling and optimizer are those of the recipe arithmetic.yaml; objective,
packing, update and backend are the learner's, and responses come from the embedded engine's decoder, with its logprobs.
Only the broker is left out: there lag would follow from timing, here it is set. Runs of a seed start from the same
weights, see the same prompts and draw the same noise.

`compositions` has the compared losses. The second part of the warm-up hides the lesson of the first, so the reward
rises within a minute: differences between corrections are real, their size is this small model's.
"""
