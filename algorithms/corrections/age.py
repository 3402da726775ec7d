"""A weight that falls with lag itself, whatever the ratios say."""

from collections.abc import Callable
from typing import Literal

import torch

from headway.algorithms.metrics import Metrics, masked_mean
from headway.algorithms.tokens import Tokens


def age_weight(
    policy_logprobs_T: torch.Tensor,
    tokens: Tokens,
    *,
    kind: Literal["power", "exponential", "linear"] = "power",
    rate: float = 0.5,
    zero_above_lag: int | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """w_t = f(lag_t): power (1 + lag)^-rate, exponential exp(-rate lag), linear max(0, 1 - rate lag).

    The weight depends on versions alone, not on logprobs. In all three kinds f(0) = 1 and the slope there is -rate;
    power falls slowest (0.5 at lag 3 for rate 0.5), linear is 0 from lag 1 / rate on. Above
    `zero_above_lag` every kind is 0; None sets no such limit.
    It shrinks the step on stale tokens beside any other correction and replaces none: ratios correct a bias, this
    weight only reduces the tokens' influence. The sum of the weights is not restored.

    Source: none for language models; verl, TRL, slime, AReaL, prime-rl and SkyRL bound or measure lag but have no
    loss weight by age that we know of. The power form at 0.5 is FedAsync's in federated learning (Xie et al.
    2019, arXiv:1903.03934); TorchRL samples replay with 1 / (1 + lag). Treat it as an experiment.
    """
    lags_T = tokens.lags_T.to(torch.promote_types(policy_logprobs_T.dtype, tokens.loss_mask_T.dtype))
    weights_T = _DECAYS[kind](lags_T, rate)
    if zero_above_lag is not None:
        weights_T = torch.where(tokens.lags_T > zero_above_lag, torch.zeros_like(weights_T), weights_T)
    weights_T = torch.where(tokens.loss_mask_T > 0, weights_T, torch.ones_like(weights_T))
    return weights_T, {
        **masked_mean("age_weight", weights_T, tokens.loss_mask_T),
        **masked_mean("age_masked_fraction", weights_T == 0, tokens.loss_mask_T),
    }


def _power(lags_T: torch.Tensor, rate: float) -> torch.Tensor:
    return (1 + lags_T) ** -rate


def _exponential(lags_T: torch.Tensor, rate: float) -> torch.Tensor:
    return torch.exp(-rate * lags_T)


def _linear(lags_T: torch.Tensor, rate: float) -> torch.Tensor:
    return (1 - rate * lags_T).clamp(min=0)


_DECAYS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "power": _power,
    "exponential": _exponential,
    "linear": _linear,
}
