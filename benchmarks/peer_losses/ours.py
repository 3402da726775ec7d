"""Headway's side: the learner's own composition of a recipe's keys, or one function."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from headway.algorithms.advantages import ADVANTAGES
from headway.algorithms.corrections import CORRECTIONS
from headway.algorithms.metrics import Metrics, summarize
from headway.algorithms.preferences import PREFERENCES, bradley_terry, kto, reference_point_of, reference_point_sums
from headway.algorithms.presets import PRESETS
from headway.algorithms.ratios import KL_ESTIMATORS
from headway.algorithms.returns import clipped_value_loss, gae, returns_to_go, whiten, whitening_sums
from headway.algorithms.tokens import segment_sum
from headway.learner.algorithm_config import AlgorithmConfig
from headway.learner.objective.loss import Objective

from .sample import Outcome, Sample

Side = Callable[[Sample], Outcome]
"""One side of a setting."""
Setting = tuple[str, Side, Side]
"""A name, Headway's side, and the peer's."""


def composed(
    objective: str,
    options: dict[str, Any] | None = None,
    *,
    anchor: str = "behavior",
    corrections: tuple[dict[str, Any], ...] = (),
    aggregation: str = "token_mean",
    kl: float = 0.0,
) -> Side:
    """Return the loss of a recipe with these keys, and its gradient by token."""
    raw = {
        "objective": {"kind": objective, "anchor": anchor, "options": options or {}},
        "corrections": corrections,
        "aggregation": {"kind": aggregation},
        "kl": {"coefficient": kl},
    }

    def side(sample: Sample) -> Outcome:
        learner = Objective(msgspec.convert(raw, AlgorithmConfig), max_new_tokens=sample.longest)
        token_loss = learner.token_loss(
            [sample.batch()],
            proximal_logprobs=[sample.proximal_T],
            reference_logprobs=[sample.reference_T],
            current_logprobs=[sample.current_T],
        )
        return differentiated(sample, lambda current_T: token_loss(0, current_T)[0])

    return side


def online(kind: str, **options: Any) -> Side:
    """Return the loss of algorithm.preset=online_dpo with this loss of pairs, and its gradient by token."""
    raw = {**PRESETS["online_dpo"].algorithm, "objective": {"kind": kind, "anchor": "reference", "options": options}}

    def side(sample: Sample) -> Outcome:
        learner = Objective(msgspec.convert(raw, AlgorithmConfig))
        token_loss = learner.token_loss([sample.batch()], reference_logprobs=[sample.reference_T])
        return differentiated(sample, lambda current_T: token_loss(0, logprobs(current_T))[0])

    return side


def differentiated(sample: Sample, loss: Callable[[torch.Tensor], torch.Tensor]) -> Outcome:
    """Return a loss of the current logprobs [T], and its gradient."""
    current_T = sample.current_T.clone().requires_grad_()
    value = loss(current_T)
    (gradient_T,) = torch.autograd.grad(value, current_T)
    return Outcome(value.detach(), gradient_T)


def kept(correction: str, /, **options: Any) -> Side:
    """Return the trained tokens that a mask leaves, by the proximal policy."""

    def side(sample: Sample) -> Outcome:
        weights_T, _ = CORRECTIONS[correction](sample.proximal_T, sample.batch().tokens, **options)
        return Outcome(weights_T * sample.mask_T)

    return side


def advantages(kind: str, **options: Any) -> Side:
    """Return advantages at trained tokens."""

    def side(sample: Sample) -> Outcome:
        advantages_S, _ = ADVANTAGES[kind](sample.rewards_S, sample.group, **options)
        return Outcome(sample.spread(advantages_S) * sample.mask_T)

    return side


def generalized(gamma: float, lam: float) -> Side:
    """Return whitened advantages, and returns."""

    def side(sample: Sample) -> Outcome:
        advantages_T, returns_T = gae(
            sample.rewards_T, sample.values_T, sample.mask_T, sample.cu_seqlens, gamma=gamma, lam=lam
        )
        return Outcome(torch.stack([_whitened(advantages_T, sample), returns_T]))

    return side


def reinforce_plus_plus(gamma: float) -> Side:
    """Return advantages and returns of tokens."""

    def side(sample: Sample) -> Outcome:
        returns_T = returns_to_go(sample.rewards_T, sample.mask_T, sample.cu_seqlens, gamma=gamma)
        return Outcome(torch.stack([_whitened(returns_T, sample), returns_T]))

    return side


def kl(kind: str) -> Side:
    """Return the mean over trained tokens."""

    def loss(current_T: torch.Tensor, sample: Sample) -> torch.Tensor:
        estimates_T = KL_ESTIMATORS[kind](current_T, sample.reference_T, sample.mask_T)
        return estimates_T.sum() / sample.mask_T.sum()

    return lambda sample: differentiated(sample, lambda current_T: loss(current_T, sample))


def value_loss(clip: float) -> Side:
    """Return the loss with the current logprobs as the critic's new values."""

    def loss(current_T: torch.Tensor, sample: Sample) -> torch.Tensor:
        losses_T, _ = clipped_value_loss(current_T, sample.values_T, sample.rewards_T, sample.mask_T, clip=clip)
        return losses_T.sum() / sample.mask_T.sum()

    return lambda sample: differentiated(sample, lambda current_T: loss(current_T, sample))


def logprobs(current_T: torch.Tensor) -> torch.Tensor:
    """Return [T] logprobs below 0, for losses that take the probability itself; the sample's own may be above 0."""
    return -current_T.abs() - 0.01


def preferred(kind: str, *, is_token_mean: bool = False, metrics: Sequence[str] = (), **options: Any) -> Side:
    """Return the mean over pairs, or these metrics.

    With `is_token_mean` the supervised term of ORPO is the mean over all chosen tokens.
    """

    def side(sample: Sample) -> Outcome:
        if is_token_mean:
            chosen_S = segment_sum(sample.mask_T, sample.cu_seqlens)[0::2]
            options["nll_length"] = float(chosen_S.mean())

        def losses(current_T: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
            inputs = (logprobs(current_T), sample.reference_T, sample.mask_T, sample.cu_seqlens)
            return PREFERENCES[kind](*inputs, **options)

        return _mean_or_metrics(sample, losses, metrics)

    return side


def judged(*, metrics: Sequence[str] = (), **options: Any) -> Side:
    """Return KTO's mean over responses, or these metrics.

    The proximal logprobs are the current policy's of mismatched responses, the behavior logprobs the reference
    policy's.
    """

    def side(sample: Sample) -> Outcome:
        sums = reference_point_sums(sample.proximal_T, sample.behavior_T, sample.mask_T, sample.cu_seqlens)
        point = reference_point_of(*sums)

        def losses(current_T: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
            inputs = (logprobs(current_T), sample.reference_T, sample.mask_T, sample.cu_seqlens)
            return kto(*inputs, sample.is_desirable, point, **options)

        return _mean_or_metrics(sample, losses, metrics)

    return side


def response_scores(sample: Sample, current_T: torch.Tensor) -> torch.Tensor:
    """Return scores [S] as a reward model's, as differentiable as a sum."""
    return segment_sum(current_T, sample.cu_seqlens)


def centered_scores(centering: float, *, margin: bool) -> Side:
    """Return Bradley and Terry's mean over pairs."""

    def loss(current_T: torch.Tensor, sample: Sample) -> torch.Tensor:
        margins_P = sample.margins if margin else 0.0
        losses_P, _ = bradley_terry(response_scores(sample, current_T), margin=margins_P, centering=centering)
        return losses_P.sum() / len(losses_P)

    return lambda sample: differentiated(sample, lambda current_T: loss(current_T, sample))


def over_share_left(rule: dict[str, Any]) -> Side:
    """Return a policy gradient masked by the current policy, over the share of trained tokens that the mask leaves."""

    def side(sample: Sample) -> Outcome:
        weights_T, _ = CORRECTIONS[rule["kind"]](sample.current_T, sample.batch().tokens, **rule["options"])
        share = (weights_T * sample.mask_T).sum() / sample.mask_T.sum()
        value, gradient_T = composed("policy_gradient", corrections=(rule,))(sample)
        assert gradient_T is not None
        return Outcome(value / share, gradient_T / share)

    return side


def _mean_or_metrics(
    sample: Sample, losses: Callable[[torch.Tensor], tuple[torch.Tensor, Metrics]], names: Sequence[str]
) -> Outcome:
    if names:
        numbers = summarize({name: float(value) for name, value in losses(sample.current_T)[1].items()})
        return Outcome(torch.tensor([numbers[name] for name in names]))
    return differentiated(sample, lambda current_T: losses(current_T)[0].mean())


def _whitened(values_T: torch.Tensor, sample: Sample) -> torch.Tensor:
    return whiten(values_T, sample.mask_T, *whitening_sums(values_T, sample.mask_T))
