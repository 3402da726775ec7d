"""Metrics of a loss, as sums that add up over micro-batches and ranks.

A metric X is a pair `X_sum`, `X_count` (its mean is their quotient); any other name is a maximum, never negative, and 0
without tokens. `merge` joins the reports of parts, `summarize` computes means from the whole. The effective sample
size `ess` has three sums: `weight_sum`, `weight_square_sum`, `weight_count`; with a prefix they give `PREFIX_ess`.
`by_lag/X` has the sums of X in each of LAG_BUCKETS, which `read` names `by_lag/2/X` and `summarize_by_lag` shows.
"""

import functools
from collections.abc import Iterable, Mapping

import torch

from .ratios import token_log_ratio
from .tokens import Tokens, segment_sum, sequence_of_token, spread

Metrics = dict[str, torch.Tensor]
"""Sums of one micro-batch by name: `X_sum` and `X_count` for a mean X; any other name is a maximum."""

LENGTHS = (64, 256, 1024, 4096)
"""Upper bounds of the length buckets of `survival`, in trained tokens of a sequence; one more bucket has no bound."""
LAGS = (0, 1, 3, 7, 15)
"""Upper bounds of the lag buckets of `survival`, in versions; one more bucket has no bound."""
LAG_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512, 1000)
"""The largest lag of each bucket of `by_lag`, in versions; the last bucket has all larger lags, too."""
BY_LAG = "by_lag/"
"""The beginning of the names of sums by lag."""


def masked_mean(name: str, values_T: torch.Tensor, mask_T: torch.Tensor) -> Metrics:
    """Returns the pair for the mean of `values_T` over the tokens with mask 1. Booleans give a share."""
    values_T, mask_T = values_T.detach(), mask_T.detach()
    counted_T = torch.where(mask_T > 0, values_T, torch.zeros_like(values_T))
    return {f"{name}_sum": (counted_T * mask_T).sum(), f"{name}_count": mask_T.sum()}


def mean(name: str, values: torch.Tensor) -> Metrics:
    """Returns the pair for the mean of all `values`, of pairs or responses. Booleans give a share."""
    values = values.detach()
    return {f"{name}_sum": values.sum(), f"{name}_count": torch.full((), values.numel(), device=values.device)}


def share(name: str, is_counted_T: torch.Tensor, tokens: Tokens) -> Metrics:
    """Returns the pair for the share of trained tokens with `is_counted_T` [T], over all of them and by lag."""
    counted_T = is_counted_T.detach().to(tokens.loss_mask_T.dtype)
    return {
        **masked_mean(name, counted_T, tokens.loss_mask_T),
        **by_lag({f"{name}_sum": counted_T, f"{name}_count": torch.ones_like(counted_T)}, tokens),
    }


def by_lag(values: Mapping[str, torch.Tensor], tokens: Tokens) -> Metrics:
    """Returns `by_lag/NAME` for each of `values` [T]: [B] its sum over the trained tokens of each of LAG_BUCKETS.

    The sums are float64, and added in one order: a CPU counts token by token, which a GPU does in any order, so there
    they are a product of matrices.
    """
    names, mask_T = list(values), tokens.loss_mask_T.detach() > 0
    trained = [torch.where(mask_T, values[name].detach(), 0.0).double() for name in names]
    bucket_T = _bucket(tokens.lags_T, LAG_BUCKETS[:-1])
    if bucket_T.device.type == "cpu":
        # of no tokens it gives integers
        sums = [torch.bincount(bucket_T, values_T, len(LAG_BUCKETS)).double() for values_T in trained]
        return dict(zip((f"{BY_LAG}{name}" for name in names), sums, strict=True))
    buckets_B = torch.arange(len(LAG_BUCKETS), device=bucket_T.device)
    is_in_BT = ((bucket_T == buckets_B[:, None]) & mask_T).double()
    return dict(zip((f"{BY_LAG}{name}" for name in names), torch.stack(trained) @ is_in_BT.T, strict=True))


def policy_gap(policy_logprobs_T: torch.Tensor, tokens: Tokens) -> Metrics:
    """Returns metrics of the distance of the learner's policy from the sampler's; r_t = pi(y_t) / mu(y_t).

    ratio: mean and largest; ratio_max_deviation: max |r_t - 1|, 0 when exactly on-policy; kl_behavior: mean
    of r_t - 1 - log r_t, an unbiased and never negative estimate of KL(mu || pi) on samples of mu; and the
    sums of `ess`. The mean ratio and the sums of `ess` also by lag.
    """
    loss_mask_T = tokens.loss_mask_T
    log_ratio_T = token_log_ratio(policy_logprobs_T.detach(), tokens.behavior_logprobs_T, loss_mask_T)
    ratio_T = log_ratio_T.exp()
    weights_T = ratio_T * loss_mask_T
    deviation_T, one_T = torch.expm1(log_ratio_T), torch.ones_like(ratio_T)
    return {
        **masked_mean("ratio_mean", ratio_T, loss_mask_T),
        **masked_mean("kl_behavior", deviation_T - log_ratio_T, loss_mask_T),
        "ratio_max": _largest(weights_T),
        "ratio_max_deviation": _largest(deviation_T.abs() * loss_mask_T),
        "weight_sum": weights_T.sum(),
        "weight_square_sum": (weights_T**2).sum(),
        "weight_count": loss_mask_T.sum(),
        **by_lag(
            {"weight_sum": weights_T, "weight_square_sum": weights_T.double() ** 2, "weight_count": one_T}, tokens
        ),
    }


def survival(weights_T: torch.Tensor, tokens: Tokens) -> Metrics:
    """Returns pairs for the shares of trained tokens and of sequences whose weight is not 0 after all corrections.

    `weights_T` [T] are the products of all corrections' weights. In buckets named by their largest member:
    kept_length_64 (trained tokens of the sequence: to 64, 256, 1024, 4096, more) and kept_lag_1 (to 0, 1, 3, 7,
    15, more), which show a mask that prefers short or fresh responses. kept_sequences_length_64 and
    kept_sequences_lag_1 count sequences of which at least one token is left; a sequence's lag is that of its
    oldest trained token. And the sums of `final_ess`, over all trained tokens.
    """
    dtype, cu_seqlens = torch.promote_types(weights_T.dtype, torch.float32), tokens.cu_seqlens
    mask_T, weights_T = tokens.loss_mask_T.detach().to(dtype), weights_T.detach().to(dtype)
    weights_T = torch.where(mask_T > 0, weights_T, torch.zeros_like(mask_T))
    kept_T = (weights_T != 0).to(dtype)
    lengths_S = segment_sum(mask_T, cu_seqlens)
    is_trained_S, kept_S = (lengths_S > 0).to(dtype), (segment_sum(kept_T, cu_seqlens) > 0).to(dtype)
    length_S, lag_T = _bucket(lengths_S, LENGTHS), _bucket(tokens.lags_T, LAGS)
    trained_lag_T = torch.where(mask_T > 0, lag_T, torch.zeros_like(lag_T))
    lag_S = torch.zeros_like(length_S).scatter_reduce(0, sequence_of_token(cu_seqlens), trained_lag_T, "amax")
    return {
        **_in_buckets("kept_length", spread(length_S, cu_seqlens), LENGTHS, kept_T, mask_T),
        **_in_buckets("kept_lag", lag_T, LAGS, kept_T, mask_T),
        **_in_buckets("kept_sequences_length", length_S, LENGTHS, kept_S, is_trained_S),
        **_in_buckets("kept_sequences_lag", lag_S, LAGS, kept_S, is_trained_S),
        "final_weight_sum": weights_T.sum(),
        "final_weight_square_sum": (weights_T**2).sum(),
        "final_weight_count": mask_T.sum(),
    }


def read(metrics: Metrics) -> dict[str, float]:
    """Returns the metrics as numbers. They are read at once, so that the process waits for a GPU only once."""
    if not metrics:
        return {}
    values = torch.cat([value.double().reshape(-1) for value in metrics.values()]).tolist()
    return dict(zip((number for name in metrics for number in _numbers_of(name)), values, strict=True))


def _numbers_of(name: str) -> Iterable[str]:
    """Returns the names of the numbers of one metric."""
    if not name.startswith(BY_LAG):
        return (name,)
    return (f"{BY_LAG}{lag}/{name.removeprefix(BY_LAG)}" for lag in LAG_BUCKETS)


def is_additive(name: str) -> bool:
    """True if values of parts are added, False if the largest counts."""
    return name.endswith(("_sum", "_count"))


def merge(reports: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Returns one report for all parts: sums are added, maxima compared."""
    whole: dict[str, float] = {}
    for report in reports:
        for name, value in report.items():
            before = whole.get(name, 0.0)
            whole[name] = before + value if is_additive(name) else max(before, value)
    return whole


def summarize(whole: Mapping[str, float]) -> dict[str, float]:
    """Returns `X` for each pair, maxima as they are, and `ess`. Empty batches give 0; an empty bucket of `survival` is
    left out, since none of its tokens was masked. Sums by lag are left to `summarize_by_lag`."""
    whole = {name: value for name, value in whole.items() if not name.startswith(BY_LAG)}
    numbers = {name: value for name, value in whole.items() if not is_additive(name)}
    for name, count in whole.items():
        mean = name.removesuffix("_count")
        if name.endswith("_count") and mean != "weight" and (count or not name.startswith("kept_")):
            numbers[mean] = whole[f"{mean}_sum"] / count if count else 0.0
        if name.endswith("weight_square_sum"):
            prefix = name.removesuffix("weight_square_sum")
            weight_sum, weight_count = whole[f"{prefix}weight_sum"], whole[f"{prefix}weight_count"]
            numbers[f"{prefix}ess"] = effective_sample_size(weight_sum, whole[name], weight_count)
    return numbers


def summarize_by_lag(whole: Mapping[str, float]) -> dict[int, dict[str, float]]:
    """Returns the figures of each bucket of lag that has trained tokens, by its largest lag.

    They are what `summarize` returns of its tokens alone, and `ratio_mean`.
    """
    parts: dict[int, dict[str, float]] = {}
    for name, value in whole.items():
        if name.startswith(BY_LAG):
            lag, _, of = name.removeprefix(BY_LAG).partition("/")
            parts.setdefault(int(lag), {})[of] = value
    return {
        lag: {"ratio_mean": sums["weight_sum"] / sums["weight_count"], **summarize(sums)}
        for lag, sums in sorted(parts.items())
        if sums.get("weight_count")
    }


def effective_sample_size(weight_sum: float, weight_square_sum: float, count: float) -> float:
    """(sum w)^2 / (n sum w^2): the share of the batch that it is worth, 1 when all weights are equal. 0 if it
    is empty.

    Source: Kish 1965; Kong 1992.
    """
    return weight_sum**2 / (count * weight_square_sum) if count and weight_square_sum else 0.0


def _largest(values_T: torch.Tensor) -> torch.Tensor:
    return values_T.max() if values_T.numel() else values_T.new_zeros(())


def _bucket(values: torch.Tensor, bounds: tuple[int, ...]) -> torch.Tensor:
    """Returns the index of the first bound that is not below the value."""
    return torch.bucketize(values, _on(values.device, bounds))


@functools.cache
def _on(device: torch.device, bounds: tuple[int, ...]) -> torch.Tensor:
    """Returns the bounds on that device; to send them there anew, the process would wait for the GPU."""
    return torch.tensor(bounds, device=device)


def _in_buckets(
    name: str, bucket: torch.Tensor, bounds: tuple[int, ...], kept: torch.Tensor, trained: torch.Tensor
) -> Metrics:
    sums = kept.new_zeros(len(bounds) + 1).index_add(0, bucket, kept).unbind()
    counts = trained.new_zeros(len(bounds) + 1).index_add(0, bucket, trained).unbind()
    pairs: Metrics = {}
    for label, kept_sum, count in zip((*map(str, bounds), "more"), sums, counts, strict=True):
        pairs |= {f"{name}_{label}_sum": kept_sum, f"{name}_{label}_count": count}
    return pairs
