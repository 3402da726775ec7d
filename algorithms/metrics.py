"""What is reported of a loss, as sums that add up over micro-batches and ranks.

A metric X is a pair `X_sum`, `X_count` (its mean is their quotient); any other name is a maximum, never
negative and 0 where there is nothing. `merge` puts the reports of parts together, `summarize` turns the whole
into numbers. The effective sample size is made of three sums: `weight_sum`, `weight_square_sum`,
`weight_count`.
"""

from collections.abc import Iterable, Mapping

import torch

from .ratios import token_log_ratio

Metrics = dict[str, torch.Tensor]


def masked_mean(name: str, values_T: torch.Tensor, mask_T: torch.Tensor) -> Metrics:
    """The pair for the mean of `values_T` over the tokens with mask 1. Booleans give a share."""
    mask_T = mask_T.detach()
    return {f"{name}_sum": (values_T.detach() * mask_T).sum(), f"{name}_count": mask_T.sum()}


def policy_gap(
    policy_logprobs_T: torch.Tensor, behavior_logprobs_T: torch.Tensor, loss_mask_T: torch.Tensor
) -> Metrics:
    """How far the learner's policy has gone from the sampler's, over trained tokens; r_t = pi(y_t) / mu(y_t).

    ratio: mean and largest; ratio_max_deviation: max |r_t - 1|, 0 when exactly on-policy; kl_behavior: mean
    of r_t - 1 - log r_t, an unbiased and never negative estimate of KL(mu || pi) on samples of mu; and the
    sums of `ess`.
    """
    log_ratio_T = token_log_ratio(policy_logprobs_T.detach(), behavior_logprobs_T, loss_mask_T)
    ratio_T = log_ratio_T.exp()
    weights_T = ratio_T * loss_mask_T
    deviation_T = torch.expm1(log_ratio_T)
    return {
        **masked_mean("ratio_mean", ratio_T, loss_mask_T),
        **masked_mean("kl_behavior", deviation_T - log_ratio_T, loss_mask_T),
        "ratio_max": _largest(weights_T),
        "ratio_max_deviation": _largest(deviation_T.abs() * loss_mask_T),
        "weight_sum": weights_T.sum(),
        "weight_square_sum": (weights_T**2).sum(),
        "weight_count": loss_mask_T.sum(),
    }


def is_additive(name: str) -> bool:
    """True where the parts' values are added, False where the largest counts."""
    return name.endswith(("_sum", "_count"))


def merge(reports: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """One report of the parts' reports: sums added, maxima compared."""
    whole: dict[str, float] = {}
    for report in reports:
        for name, value in report.items():
            before = whole.get(name, 0.0)
            whole[name] = before + value if is_additive(name) else max(before, value)
    return whole


def summarize(whole: Mapping[str, float]) -> dict[str, float]:
    """Numbers for people: `X` for each pair, maxima as they are, `ess`. Empty batches give 0."""
    numbers = {name: value for name, value in whole.items() if not is_additive(name)}
    for name, count in whole.items():
        mean = name.removesuffix("_count")
        if name.endswith("_count") and mean != "weight":
            numbers[mean] = whole[f"{mean}_sum"] / count if count else 0.0
    if "weight_count" in whole:
        numbers["ess"] = effective_sample_size(whole["weight_sum"], whole["weight_square_sum"], whole["weight_count"])
    return numbers


def effective_sample_size(weight_sum: float, weight_square_sum: float, count: float) -> float:
    """(sum w)^2 / (n sum w^2): the share of the batch that it is worth, 1 when all weights are equal. 0 if it
    is empty.

    Source: Kish 1965; Kong 1992.
    """
    return weight_sum**2 / (count * weight_square_sum) if count and weight_square_sum else 0.0


def _largest(values_T: torch.Tensor) -> torch.Tensor:
    return values_T.max() if values_T.numel() else values_T.new_zeros(())
