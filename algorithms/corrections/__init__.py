"""What lag (and the engine's rounding) does to a token's weight. `broker.staleness` is where lag is bounded.

All have one signature, which your own (`package.module:function` in a recipe) shares:

    f(policy_logprobs_T, tokens, **options) -> (weights_T, metrics)

`tokens` is an `algorithms.tokens.Tokens`. The numerator is the learner's policy without gradient: the proximal
logprobs, or, for an objective without a ratio, the current ones, detached. The denominator is always the behavior
policy. Weights multiply the objective's losses; 0 masks a token.
"""
