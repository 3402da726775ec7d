"""One update of the policy: the composed objective, the critic, shaped rewards, and the optimizer steps.

    update.py: rewards ─► shaping.py ─► advantages ─► packing ─► proximal logprobs ─► loss.py ─► optimizer
                          critic.py: values; credit.py: advantages or rewards of single turns

    composition.py        the names of a recipe ─► functions of `algorithms`; refuses those that do not fit together
    catalog.py            every function and preset, for `headway algorithms` and the reference
    lag_metrics.py        a step's figures by lag
    logprob_agreement.py  how far the engine's logprobs of the first batch are from the learner's

The invariant: the loss depends neither on packing nor on the number of ranks, because its denominators are those of the
whole batch.
"""
