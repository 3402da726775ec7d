"""Composes the loss of an AlgorithmConfig from functions of `algorithms`.

    share = sum_t shares_t * ((objective_t + distillation.coefficient * taught_t) * weights_t
                              + kl.coefficient * kl_t - entropy_coefficient * entropy_t)

objective_t is the surrogate with its ratio against the anchor, taught_t a teacher's loss (distillation.place=loss),
weights_t the product of the corrections for lag, shares_t the aggregation over the whole batch. A teacher's loss of the
sampled token has the surrogate's ratio, too, without gradient. A divergence over the teacher's candidates does not
depend on the token that was sampled, and has none. The KL penalty and the bonus for the policy's entropy are not
weighted. A loss of pairs has one loss and one weight for both responses of a pair:

    share = sum_p weights_p * loss_p / pairs

A sequence, of which aggregations, ratios, corrections and losses of pairs speak, is a whole rollout: all rows of an
agent's episode together, so one that branches weighs no more than one that does not.

`composition` lists the names, and which of them fit together.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from headway.algorithms import aggregation
from headway.algorithms.distillation import reverse_kl_distillation, sft, teacher_advantages, top_k_distillation
from headway.algorithms.metrics import (
    Metrics,
    is_additive,
    masked_mean,
    merge,
    policy_gap,
    read,
    share,
    summarize,
    survival,
)
from headway.algorithms.ratios import KL_ESTIMATORS, token_ratio
from headway.algorithms.tokens import Tokens
from headway.broker.errors import HeadwayError
from headway.learner.algorithm_config import AlgorithmConfig
from headway.learner.backends.base import TokenLoss
from headway.learner.batching.batch import PackedBatch

from .composition import (
    BoundCorrection,
    OverRanks,
    check_algorithm,
    compares_with_reference,
    is_of_pairs,
    needs_proximal,
    open_aggregation,
    open_corrections,
    open_proximal,
    open_surrogate,
    weighs_distillation,
)


class Denominators(NamedTuple):
    """The tokens and sequences that one update trains, over all its micro-batches and ranks. All rows of a rollout are
    one sequence here."""

    tokens: float
    """The tokens with mask 1."""
    sequences: float
    """The sequences with at least one such token."""
    pairs: float
    """Half of all sequences: for losses of pairs."""


class Current(NamedTuple):
    """The trained policy's outputs on a micro-batch, with gradient."""

    logprobs_T: torch.Tensor
    """[T] of the tokens."""
    candidates_TC: torch.Tensor | None
    """[T, C] of a teacher's candidates in their places; None: there are none."""
    entropies_T: torch.Tensor | None
    """[T] of the distributions from which the tokens come, in nats; None: the loss has no bonus for them."""

    @classmethod
    def of(cls, batch: PackedBatch, found_T: torch.Tensor) -> "Current":
        """Splits what a backend gives for the batch (`PackedBatch.candidates_TC`, `wants_confidence`)."""
        if batch.wants_confidence:
            return cls(found_T[:, 0], None, found_T[:, 2])
        return cls(found_T, None, None) if found_T.dim() == 1 else cls(found_T[:, 0], found_T[:, 2:], None)


def local(values: Sequence[float]) -> Sequence[float]:
    """Returns the values: the reduction over a single rank."""
    return values


def denominators(batches: Sequence[PackedBatch], sum_over_ranks: OverRanks = local) -> Denominators:
    """Returns the counts of the whole update. Collective if `sum_over_ranks` is."""
    tokens = sum(float(batch.loss_mask_T.sum()) for batch in batches)
    sequences = sum(float(aggregation.trained_sequences(batch.loss_mask_T, batch.rollouts)) for batch in batches)
    pairs = sum(batch.num_rollouts / 2 for batch in batches)
    return Denominators(*sum_over_ranks([tokens, sequences, pairs]))


class Objective:
    """One checked composition. Raises ConfigError, with the reason, for parts that do not fit together."""

    def __init__(
        self, config: AlgorithmConfig, *, is_one_update: bool = False, max_new_tokens: int | None = None
    ) -> None:
        """`is_one_update`: each batch is trained in a single update, so the proximal policy is the current one, and
        the loss uses its logprobs without another forward pass. `max_new_tokens`: the default length of a fixed
        denominator.
        """
        check_algorithm(config)
        self._config, self._max_new_tokens = config, max_new_tokens
        self.is_of_pairs = is_of_pairs(config)
        """True where rollouts 2p and 2p + 1 of every micro-batch are the chosen and the rejected one of a pair."""
        self.needs_proximal = needs_proximal(config) and not is_one_update
        has_penalty = config.kl.coefficient > 0 and config.kl.place == "loss"
        self.needs_reference = has_penalty or compares_with_reference(config)
        self._anchor = config.objective.anchor
        self._surrogate = open_surrogate(config)
        self._corrections = open_corrections(config)
        self.needs_current = any(c.needs_batch and self._is_of_current(c) for c in self._corrections)
        self._approximate_proximal = open_proximal(config)
        self._aggregate = open_aggregation(config, max_new_tokens)
        self._penalty = KL_ESTIMATORS[config.kl.kind]
        self._kl_coefficient = config.kl.coefficient
        self._entropy_coefficient = config.entropy_coefficient
        self.needs_entropy = config.entropy_coefficient > 0
        """True where batches have to ask a policy for its entropies (`PackedBatch.wants_confidence`)."""
        own = [config.objective.kind, config.proximal, *(correction.kind for correction in config.corrections)]
        self.ignores_context = not any(":" in kind for kind in own)
        """True if no logprob of a token with mask 0 is read; functions of a recipe's own may read them."""
        self._distillation = config.distillation
        self._weighs_distillation = weighs_distillation(config)

    def of_first_update(self) -> "Objective":
        """Returns the same loss for the weights before the step: their logprobs are the proximal ones, so it needs no
        other forward pass for them."""
        return Objective(self._config, is_one_update=True, max_new_tokens=self._max_new_tokens)

    def token_loss(
        self,
        batches: Sequence[PackedBatch],
        sum_over_ranks: OverRanks = local,
        proximal_logprobs: Sequence[torch.Tensor] | None = None,
        reference_logprobs: Sequence[torch.Tensor] | None = None,
        current_logprobs: Sequence[torch.Tensor] | None = None,
    ) -> TokenLoss:
        """Returns the loss of one update over `batches`; logprobs are [T], one a batch. Collective over the ranks.

        `current_logprobs` are those of the weights before this update, for corrections that need statistics of the
        whole update. The loss gets the same numbers again, with gradient.
        """
        proximal_logprobs = _needed(proximal_logprobs, self.needs_proximal)
        current_logprobs = _needed(current_logprobs, self.needs_current)
        reference_logprobs = _needed(reference_logprobs, self.needs_reference)
        whole = denominators(batches, sum_over_ranks)
        judged = self._policy_loss(batches, proximal_logprobs or current_logprobs)
        corrections = [
            correction.for_batch(
                (current_logprobs if self._is_of_current(correction) else proximal_logprobs) or (),
                judged,
                sum_over_ranks,
            )
            for correction in self._corrections
        ]

        def loss(index: int, found_T: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
            current = Current.of(batches[index], found_T)
            proximal_T = self._proximal(batches[index], current.logprobs_T, proximal_logprobs, index)
            reference_T = reference_logprobs[index] if reference_logprobs else None
            share, metrics = self._share(batches[index], whole, corrections, current, proximal_T, reference_T)
            return share, read(metrics)

        return loss

    def _policy_loss(
        self, batches: Sequence[PackedBatch], policy_logprobs: Sequence[torch.Tensor] | None
    ) -> Sequence[Tokens]:
        """Returns what corrections of a whole update look at. `policy_logprobs`: the anchor's, unless that is the
        policy that sampled; None if no correction needs them."""
        if self._anchor == "behavior":
            policy_logprobs = [batch.behavior_logprobs_T for batch in batches]
        if policy_logprobs is None:
            return [batch.tokens for batch in batches]
        return [self._taught(batch, one_T)[0].tokens for batch, one_T in zip(batches, policy_logprobs, strict=True)]

    def _taught(self, batch: PackedBatch, policy_T: torch.Tensor) -> tuple[PackedBatch, Metrics]:
        """Returns the batch with the teacher's term in its advantages, if it belongs there."""
        if not self._distillation.coefficient or self._distillation.place == "loss":
            return batch, {}
        advantages_T, metrics = teacher_advantages(
            policy_T, _of_teacher(batch), batch.tokens, coefficient=self._distillation.coefficient
        )
        return replace(batch, advantages_T=advantages_T), metrics

    def _with_distillation(
        self, losses_T: torch.Tensor, batch: PackedBatch, current: Current, anchor_T: torch.Tensor
    ) -> tuple[torch.Tensor, Metrics]:
        """[T] the losses with the teacher's, if it belongs there."""
        if not self._distillation.coefficient or self._distillation.place == "advantage":
            return losses_T, {}
        current_T = current.logprobs_T
        taught_T, metrics = reverse_kl_distillation(current_T, _of_teacher(batch), batch.tokens)
        if self._distillation.candidates:
            taught_T, of_candidates = self._divergence(batch, current)
            metrics |= {f"top_k_{name}": value for name, value in of_candidates.items()}
        elif self._weighs_distillation:
            taught_T = taught_T * token_ratio(current_T.detach(), anchor_T, batch.loss_mask_T)
        return losses_T + self._distillation.coefficient * taught_T, metrics

    def _divergence(self, batch: PackedBatch, current: Current) -> tuple[torch.Tensor, Metrics]:
        """[T] the divergence over the teacher's candidates; an empty micro-batch may lack them."""
        student_TC, teacher_TC = current.candidates_TC, batch.teacher_logprobs_TC
        assert batch.num_tokens == 0 or (student_TC is not None and teacher_TC is not None)
        if student_TC is None or teacher_TC is None:
            student_TC = teacher_TC = current.logprobs_T.new_zeros(0, 1)
        options = self._distillation
        return top_k_distillation(
            student_TC, teacher_TC, batch.loss_mask_T, divergence=options.divergence, beta=options.beta
        )

    def _is_of_current(self, correction: BoundCorrection) -> bool:
        """True if the correction weighs the current policy: a trust region does, and without a proximal policy all
        do."""
        return correction.is_trust_region or not self.needs_proximal

    def _proximal(
        self, batch: PackedBatch, current_T: torch.Tensor, recomputed: Sequence[torch.Tensor] | None, index: int
    ) -> torch.Tensor:
        """Returns logprobs of the policy before the step: recomputed, interpolated, or the current ones if equal."""
        if self._approximate_proximal is not None:
            return self._approximate_proximal(current_T, batch.tokens)
        return recomputed[index] if recomputed else current_T.detach()

    @staticmethod
    def combine_reports(
        reports: Sequence[dict[str, float]],
        sum_over_ranks: OverRanks = local,
        max_over_ranks: OverRanks = local,
    ) -> dict[str, float]:
        """Returns the batch's metrics, not by lag, from its micro-batches' reports. Collective, as `whole_report`."""
        return summarize(whole_report(reports, sum_over_ranks, max_over_ranks))

    def _share(
        self,
        batch: PackedBatch,
        whole: Denominators,
        corrections: Sequence[BoundCorrection],
        current: Current,
        proximal_T: torch.Tensor,
        reference_T: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Metrics]:
        current_T = current.logprobs_T
        anchor_T = batch.behavior_logprobs_T if self._anchor == "behavior" else proximal_T
        batch, of_teacher = self._taught(batch, anchor_T)
        weights_T, of_weights = self._weights(batch, corrections, current_T, proximal_T)
        metrics = {**policy_gap(proximal_T, batch.tokens), **of_teacher, **of_weights}
        if self.is_of_pairs:
            losses_P, of_pairs = self._surrogate(current_T, reference_T, batch.loss_mask_T, batch.rollouts)
            weights_P = weights_T[batch.rollouts[:-1:2].long()]  # all tokens of a pair have the same
            return self._aggregate(losses_P, weights_P, pairs=whole.pairs), {**metrics, **of_pairs}
        losses_T, of_tokens = self._surrogate(current_T, anchor_T, batch.tokens)
        losses_T, of_loss = self._with_distillation(losses_T, batch, current, anchor_T)
        losses_T, of_penalty = self._penalized(losses_T * weights_T, batch, current, reference_T)
        shares_T = self._aggregate(batch.loss_mask_T, batch.rollouts, tokens=whole.tokens, sequences=whole.sequences)
        return (losses_T * shares_T).sum(), {**metrics, **of_tokens, **of_loss, **of_penalty}

    def _weights(
        self,
        batch: PackedBatch,
        corrections: Sequence[BoundCorrection],
        current_T: torch.Tensor,
        proximal_T: torch.Tensor,
    ) -> tuple[torch.Tensor, Metrics]:
        """[T] the product of the corrections' weights, and what is left by them."""
        weights_T, metrics = torch.ones_like(batch.loss_mask_T), Metrics()
        for correction in corrections:
            policy_T = current_T.detach() if correction.is_trust_region else proximal_T
            factors_T, reported = correction.function(policy_T, batch.tokens)
            weights_T = weights_T * factors_T
            metrics |= reported
        metrics |= share("mask_fraction", weights_T == 0, batch.tokens)
        if corrections:
            metrics |= survival(weights_T, batch.tokens)
        return weights_T, metrics

    def _penalized(
        self, losses_T: torch.Tensor, batch: PackedBatch, current: Current, reference_T: torch.Tensor | None
    ) -> tuple[torch.Tensor, Metrics]:
        """[T] the losses with the KL penalty and less the bonus for entropy, if there are any."""
        metrics = Metrics()
        if reference_T is not None:
            penalty_T = self._penalty(current.logprobs_T, reference_T, batch.loss_mask_T)
            losses_T = losses_T + self._kl_coefficient * penalty_T
            metrics |= masked_mean("kl_reference", penalty_T, batch.loss_mask_T)
        if current.entropies_T is not None:
            entropies_T = current.entropies_T.where(batch.loss_mask_T > 0, 0.0)
            losses_T = losses_T - self._entropy_coefficient * entropies_T
            metrics |= masked_mean("entropy", entropies_T, batch.loss_mask_T)
        return losses_T, metrics


def whole_report(
    reports: Sequence[dict[str, float]], sum_over_ranks: OverRanks = local, max_over_ranks: OverRanks = local
) -> dict[str, float]:
    """Returns one report for all micro-batches and ranks. Collective; every rank has at least one report."""
    mine = merge(reports)
    added = sorted(name for name in mine if is_additive(name))
    compared = sorted(name for name in mine if not is_additive(name))
    whole = dict(zip(added, sum_over_ranks([mine[name] for name in added]), strict=True))
    return whole | dict(zip(compared, max_over_ranks([mine[name] for name in compared]), strict=True))


def supervised_loss(batches: Sequence[PackedBatch], sum_over_ranks: OverRanks = local) -> TokenLoss:
    """Returns the cross-entropy loss: the mean of -log pi(y_t) over the trained tokens of all batches and ranks."""
    tokens = denominators(batches, sum_over_ranks).tokens

    def loss(index: int, current_logprobs_T: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        mask_T = batches[index].loss_mask_T
        losses_T = sft(current_logprobs_T, mask_T)
        return losses_T.sum() / max(tokens, 1.0), read(masked_mean("cross_entropy", losses_T, mask_T))

    return loss


def _needed(logprobs: Sequence[torch.Tensor] | None, is_needed: bool) -> Sequence[torch.Tensor] | None:
    assert logprobs is not None or not is_needed
    return logprobs if is_needed else None


def _of_teacher(batch: PackedBatch) -> torch.Tensor:
    """[T] the teacher's logprobs. Raises HeadwayError for a batch without them."""
    if batch.teacher_logprobs_T is None:
        raise HeadwayError(
            "The step has a trajectory without its teacher's logprobs, as a run without a teacher samples them; it"
            " cannot be trained with algorithm.distillation.coefficient above 0."
        )
    return batch.teacher_logprobs_T
