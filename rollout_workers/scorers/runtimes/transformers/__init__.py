"""transformers as a runtime of scorers: a model in this process.

    requests ─► loading.py: sequences of several lengths as one batch ─► reward_model.py: a score of each
                                                                      └► teacher.py: logprobs of each token

The invariant: padding reaches no score. An answer depends on its own request alone, whatever else is in the batch.
"""
