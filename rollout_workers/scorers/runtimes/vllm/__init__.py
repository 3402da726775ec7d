"""vLLM as a runtime of scorers, in the scorer's own process.

    start.py ─► engine.py: a batch of prompts ─► vLLM ─► reward_model.py: the head's output at the last token
                                                      └► teacher.py: the logprobs of the prompt's last tokens

The invariant: scores are those of the model's files. A head without weights there is refused, no activation changes a
score, and a batch that failed leaves no request for the next one.
"""
