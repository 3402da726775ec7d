"""verl's own functions, called as its trainer calls them."""

from typing import Any

import numpy as np
import torch
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config import ActorConfig

from .ours import Side, differentiated
from .sample import Outcome, Sample


def policy_loss(
    mode: str, aggregation: str, *, correction: dict[str, Any] | None = None, kl: float = 0.0, **actor: Any
) -> Side:
    """Return the loss against the behavior policy; with a correction it is against the proximal one, weighed by it."""

    def side(sample: Sample) -> Outcome:
        mask, rollout, old = (sample.padded(x_T) for x_T in (sample.mask_T, sample.behavior_T, sample.proximal_T))
        weights = None
        if correction is not None:
            weights, _ = rollout_corr_helper.compute_rollout_correction_weights(old - rollout, mask, **correction)

        def loss(current_T: torch.Tensor) -> Any:
            total, _ = core_algos.get_policy_loss_fn(mode)(
                old_log_prob=rollout if correction is None else old,
                log_prob=sample.padded(current_T),
                advantages=sample.padded(sample.spread(sample.advantages_S)),
                response_mask=mask,
                loss_agg_mode=aggregation,
                config=_actor(**actor),
                rollout_is_weights=weights,
            )
            penalty = core_algos.kl_penalty(sample.padded(current_T), sample.padded(sample.reference_T), "k3")
            return total + kl * core_algos.agg_loss(penalty, mask, aggregation)

        return differentiated(sample, loss)

    return side


def bypass(aggregation: str, **correction: Any) -> Side:
    """Return verl's loss without proximal logprobs: the correction is of the current policy."""
    return policy_loss("bypass_mode", aggregation, policy_loss={"rollout_correction": correction})


def rejection(option: str, threshold: str | float) -> Side:
    """Return the trained tokens that verl's mask leaves."""

    def side(sample: Sample) -> Outcome:
        log_ratio = sample.padded(sample.proximal_T - sample.behavior_T)
        kept, _ = rollout_corr_helper.compute_rollout_rejection_mask(
            log_ratio, sample.padded(sample.mask_T), option, threshold
        )
        return Outcome(sample.packed(kept))

    return side


def advantages(name: str, **options: Any) -> Side:
    """Return advantages at trained tokens, of a reward for each response."""

    def side(sample: Sample) -> Outcome:
        mask = sample.padded(sample.mask_T)
        rewards = torch.zeros_like(mask)
        rewards[:, 0] = sample.rewards_S
        groups = np.array(sample.group.tolist())
        found, _ = core_algos.get_adv_estimator_fn(name)(rewards, mask, index=groups, **options)
        return Outcome(sample.packed(found) * sample.mask_T)

    return side


def generalized(gamma: float, lam: float) -> Side:
    """Return whitened advantages, and returns."""

    def side(sample: Sample) -> Outcome:
        rewards, values, mask = (sample.padded(x_T) for x_T in (sample.rewards_T, sample.values_T, sample.mask_T))
        both = core_algos.compute_gae_advantage_return(rewards, values, mask, gamma, lam)
        return Outcome(torch.stack([sample.packed(each) * sample.mask_T for each in both]))

    return side


def reinforce_plus_plus(gamma: float) -> Side:
    """Return advantages and returns of tokens."""

    def side(sample: Sample) -> Outcome:
        both = core_algos.compute_reinforce_plus_plus_outcome_advantage(
            sample.padded(sample.rewards_T), sample.padded(sample.mask_T), AlgoConfig(gamma=gamma)
        )
        return Outcome(torch.stack([sample.packed(each) for each in both]))

    return side


def kl(kind: str) -> Side:
    """Return the mean over trained tokens."""

    def side(sample: Sample) -> Outcome:
        def loss(current_T: torch.Tensor) -> Any:
            estimates = core_algos.kl_penalty(sample.padded(current_T), sample.padded(sample.reference_T), kind)
            return core_algos.agg_loss(estimates, sample.padded(sample.mask_T), "token-mean")

        return differentiated(sample, loss)

    return side


def value_loss(clip: float) -> Side:
    """Return the loss with the current logprobs as the critic's new values."""

    def side(sample: Sample) -> Outcome:
        returns, old, mask = (sample.padded(x_T) for x_T in (sample.rewards_T, sample.values_T, sample.mask_T))

        def loss(current_T: torch.Tensor) -> Any:
            return core_algos.compute_value_loss(sample.padded(current_T), returns, old, mask, clip)[0]

        return differentiated(sample, loss)

    return side


def _actor(**options: Any) -> Any:
    policy_loss = options.pop("policy_loss", None)
    config = ActorConfig(strategy="fsdp", ppo_micro_batch_size_per_gpu=1, rollout_n=1, **options)
    if policy_loss is not None:
        object.__setattr__(config, "policy_loss", policy_loss)
    return config
