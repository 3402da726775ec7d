"""Surrogate objectives: (logprobs, tokens) -> losses_T, to be minimized; nothing is aggregated here.

All have one signature, which your own (`package.module:function` in a recipe) shares:

    f(current_logprobs_T, anchor_logprobs_T, tokens, **options) -> (losses_T, metrics)

`tokens` is an `algorithms.tokens.Tokens`. `anchor_logprobs_T` is the denominator of the ratio: the behavior policy's
or the proximal policy's logprobs. Losses must be finite where the mask is 0, whatever stands there (ours are 0, by
`tokens.trained_advantages`); aggregation gives them no weight. Metrics: see `algorithms.metrics`.

    a bound silences the token        ppo_clip (token ratio), gspo, gspo_token (mean of a sequence),
                                      sequence_clip (product of a sequence), dppo (divergence)
    a bound limits its weight         cispo (token ratio), topr (sequence, A < 0 only)
    both, ratio flipped for A > 0     aspo
    a smooth gate                     sapo
    nothing                           unclipped (token ratio), policy_gradient (no ratio)

    clipped.py       ppo_clip, gspo, gspo_token, sequence_clip, dppo, sapo, unclipped
    weighted.py      cispo, topr, aspo, policy_gradient

The invariant: a token's loss depends on its own sequence alone, so neither packing nor the number of ranks changes it.
"""

from collections.abc import Callable

import torch

from headway.algorithms.metrics import Metrics

from .clipped import dppo, gspo, gspo_token, ppo_clip, sapo, sequence_clip, unclipped
from .weighted import aspo, cispo, policy_gradient, topr

OBJECTIVES: dict[str, Callable[..., tuple[torch.Tensor, Metrics]]] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "sequence_clip": sequence_clip,
    "cispo": cispo,
    "topr": topr,
    "aspo": aspo,
    "sapo": sapo,
    "dppo": dppo,
    "unclipped": unclipped,
    "policy_gradient": policy_gradient,
}
IGNORES_ANCHOR = {"policy_gradient"}
"""Objectives whose loss is the same with any anchor: no proximal logprobs need be computed for them."""
