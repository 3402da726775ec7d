"""The proximal policy's logprobs are interpolated between behavior and current ones, without a forward pass.

mu is `lag` versions older than the weights before the step. As published, alpha(lag) = 1 / lag of the way from pi back
to mu is taken for pi_prox, and all of it at lag 0 and 1; counted from pi, one version further on, it would be
1 / (1 + lag). All have one signature:

    f(current_logprobs_T, tokens) -> proximal_logprobs_T

without gradient, 0 where the mask is 0, and within +-20 of log mu like all log ratios here. A learner that takes one
optimizer step a version needs none of this: before that step pi itself is the policy of the batch.
"""

from collections.abc import Callable

import torch

from .ratios import token_log_ratio
from .tokens import Tokens


def log_linear(current_logprobs_T: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """log pi_prox = alpha log mu + (1 - alpha) log pi, alpha = 1 / lag, and 1 at lag 0.

    With it the clip sees (pi / mu)^alpha and the importance weight is (pi / mu)^(1 - alpha), both nearer to 1 than
    the whole ratio; lag 1 is the clip anchored to the behavior policy.

    Source: A-3PO, Li, Wu and Shen 2025 (arXiv:2512.06547); AReaL's prox_logp_method loglinear, the same weights from
    the versions.
    """
    return _away_from_behavior((1 - _alpha(tokens)) * _log_ratio(current_logprobs_T, tokens), tokens)


def linear(current_logprobs_T: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """log pi_prox = log(alpha mu + (1 - alpha) pi), alpha = 1 / lag, and 1 at lag 0.

    The mean of the probabilities instead of their logarithms: never below `log_linear`, and it leans to the larger
    of the two.

    Source: AReaL's approximation `linear`, which it computes to compare with; alpha as in A-3PO
    (arXiv:2512.06547).
    """
    alpha_T, log_ratio_T = _alpha(tokens), _log_ratio(current_logprobs_T, tokens)
    return _away_from_behavior(torch.logaddexp(alpha_T.log(), torch.log1p(-alpha_T) + log_ratio_T), tokens)


def _alpha(tokens: Tokens) -> torch.Tensor:
    return 1 / tokens.lags_T.clamp(min=1).to(tokens.behavior_logprobs_T.dtype)


def _log_ratio(current_logprobs_T: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    return token_log_ratio(current_logprobs_T.detach(), tokens.behavior_logprobs_T, tokens.loss_mask_T)


def _away_from_behavior(distance_T: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    return torch.where(tokens.loss_mask_T > 0, tokens.behavior_logprobs_T + distance_T, torch.zeros_like(distance_T))


PROXIMAL: dict[str, Callable[[torch.Tensor, Tokens], torch.Tensor]] = {"log_linear": log_linear, "linear": linear}
