"""Surrogate objectives: (logprobs, tokens) -> losses_T, to be minimized; nothing is aggregated here.

All have one signature, which your own (`package.module:function` in a recipe) shares:

    f(current_logprobs_T, anchor_logprobs_T, tokens, **options) -> (losses_T, metrics)

`tokens` is an `algorithms.tokens.Tokens`. `anchor_logprobs_T` is the denominator of the ratio: the behavior policy's
or the proximal policy's logprobs. Losses must be finite where the mask is 0; aggregation gives them no weight.
Metrics: see `algorithms.metrics`.
"""
