"""Corrections weigh or mask tokens for lag and for the engine's rounding. `broker.staleness` bounds lag.

All have one signature, which your own (`package.module:function` in a recipe) shares:

    f(policy_logprobs_T, tokens, **options) -> (weights_T, metrics)

`tokens` is an `algorithms.tokens.Tokens`. The numerator is the learner's policy without gradient: the proximal
logprobs where the objective has a ratio to these, else the current ones, detached; a trust region looks at the current
ones in any case. The denominator is always the behavior policy. Weights multiply the objective's losses; 0 masks a
token. `BATCH_STATISTICS` in `masks.py` are those that some corrections need of all micro-batches of an update.

    weights.py    pi / mu itself, capped, normalized or masked: at most one (WEIGHTS); a function of lag alone
    masks.py      0 or 1 by token, sequence, KL estimate, worst token, advantage, the batch's mean of (log r)^2

The invariant: no two of WEIGHTS together, since each is the whole ratio and lag would count twice. Masks and age may
be combined with any of them and with each other.
"""

from collections.abc import Callable

import torch

from headway.algorithms.metrics import Metrics

from .masks import geometric_sequence_mask, kl_rejection, m2po, opsm, token_mask, veto
from .weights import (
    age_weight,
    decoupled,
    geometric_truncated_is,
    icepop,
    pair_truncated_is,
    self_normalized_is,
    sequence_truncated_is,
    truncated_is,
)

CORRECTIONS: dict[str, Callable[..., tuple[torch.Tensor, Metrics]]] = {
    "truncated_is": truncated_is,
    "sequence_truncated_is": sequence_truncated_is,
    "geometric_truncated_is": geometric_truncated_is,
    "self_normalized_is": self_normalized_is,
    "icepop": icepop,
    "decoupled": decoupled,
    "token_mask": token_mask,
    "geometric_sequence_mask": geometric_sequence_mask,
    "kl_rejection": kl_rejection,
    "veto": veto,
    "opsm": opsm,
    "m2po": m2po,
    "age_weight": age_weight,
}
PAIR_CORRECTIONS: dict[str, Callable[..., tuple[torch.Tensor, Metrics]]] = {"pair_truncated_is": pair_truncated_is}
"""The corrections of losses of pairs. Each is policy / behavior of the whole pair, at all tokens of both responses."""

WEIGHTS = frozenset(
    {
        "truncated_is",
        "sequence_truncated_is",
        "geometric_truncated_is",
        "self_normalized_is",
        "icepop",
        "decoupled",
    }
)
"""Corrections that multiply by policy / behavior."""
TRUST_REGIONS = frozenset({"m2po"})
"""Corrections that bound the distance of the current policy from the behavior policy. They do not use the proximal
policy: it does not move with the updates of a step, so it would bound the first update alone."""
