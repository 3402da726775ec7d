"""The equations as naive float64 loops, one token after another; a masked token's loss is 0."""

import math
from collections.abc import Callable

import torch

from tests.algorithms.ragged import Ragged, stack

LIMIT = 20.0
ONE = torch.ones((), dtype=torch.float64)


def clamped_exp(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(x.clamp(-LIMIT, LIMIT))


def token_ratios(b: Ragged) -> torch.Tensor:
    return stack(
        [clamped_exp(b.current_T[t] - b.anchor_T[t]) if b.mask_T[t] > 0 else ONE for t in range(len(b.mask_T))]
    )


def products(b: Ragged) -> torch.Tensor:
    return stack([clamped_exp(sum((b.current_T[t] - b.anchor_T[t] for t in row), 0 * ONE)) for _, row in b.trained()])


def geometric_means(b: Ragged) -> torch.Tensor:
    means = []
    for _, row in b.trained():
        total = sum((b.current_T[t] - b.anchor_T[t] for t in row), 0 * ONE)
        means.append(clamped_exp(total / max(len(row), 1)))
    return stack(means)


def clipped(ratio: torch.Tensor, advantage: torch.Tensor, low: float, high: float) -> torch.Tensor:
    bounded = ratio.clamp(1 - low, 1 + high)
    return -torch.minimum(ratio * advantage, bounded * advantage)


def ppo_losses(b: Ragged, low: float, high: float) -> torch.Tensor:
    ratios = token_ratios(b)
    return stack([clipped(ratios[t], b.advantages_S[s] * b.mask_T[t], low, high) for s, row in b.rows() for t in row])


def gspo_loss(b: Ragged, low: float, high: float) -> torch.Tensor:
    """Equation 5: the mean over sequences (with a trained token) of the clipped sequence surrogate."""
    ratios = geometric_means(b)
    terms = [clipped(ratios[s], b.advantages_S[s], low, high) for s, row in b.trained() if row]
    return sum(terms, 0 * ONE) / max(len(terms), 1)


def sequence_clip_losses(b: Ragged, low: float, high: float) -> torch.Tensor:
    """The clipped surrogate of each whole response, in equal parts at its trained tokens."""
    ratios, losses = products(b), [0 * ONE] * len(b.mask_T)
    for s, row in b.trained():
        for t in row:
            losses[t] = clipped(ratios[s], b.advantages_S[s], low, high) / len(row)
    return stack(losses)


def at_tokens(values_S: torch.Tensor, b: Ragged) -> torch.Tensor:
    return stack([values_S[s] for s, row in b.rows() for _ in row])


def dual_clipped_losses(b: Ragged, low: float, high: float, cap: float) -> torch.Tensor:
    losses = []
    ratios = token_ratios(b)
    for s, row in b.rows():
        for t in row:
            advantage = b.advantages_S[s] * b.mask_T[t]
            surrogate = -clipped(ratios[t], advantage, low, high)
            if advantage < 0:
                surrogate = torch.maximum(surrogate, cap * advantage)
            losses.append(-surrogate)
    return stack(losses)


def gspo_token_losses(b: Ragged, advantages: list[float], low: float, high: float) -> torch.Tensor:
    """Equations 13 and 14, advantages by token. The sequence's ratio has no gradient, the token's logprob has."""
    losses = []
    for s, row in b.rows():
        ratio = geometric_means(b)[s].detach()
        for t in row:
            has_gradient = b.mask_T[t] > 0 and math.exp(-LIMIT) < ratio < math.exp(LIMIT)
            own = b.current_T[t] if has_gradient else 0 * ONE
            losses.append(clipped(ratio * torch.exp(own - own.detach()), advantages[t] * b.mask_T[t], low, high))
    return stack(losses)


def weighted_losses(b: Ragged, weight: Callable[[float, float, float, float], float]) -> torch.Tensor:
    """Return -w A log pi for trained tokens, 0 for others; w(token ratio, advantage, log pi, log anchor) is given."""
    ratios = token_ratios(b).tolist()
    losses = []
    for s, row in b.rows():
        for t in row:
            advantage = float(b.advantages_S[s])
            if b.mask_T[t] > 0:
                w = weight(ratios[t], advantage, b.current_T[t].item(), b.anchor_T[t].item())
                losses.append(-w * advantage * b.current_T[t])
            else:
                losses.append(0 * ONE)
    return stack(losses)


def cispo_weight(low: float, high: float) -> Callable[[float, float, float, float], float]:
    return lambda ratio, *_: min(max(ratio, 1 - low), 1 + high)


def topr_losses(b: Ragged, cap: float) -> torch.Tensor:
    losses = []
    for s, row in b.rows():
        weight = 1.0 if b.advantages_S[s] >= 0 else min(products(b)[s].item(), cap)
        losses += [-weight * b.advantages_S[s] * b.current_T[t] if b.mask_T[t] > 0 else 0 * ONE for t in row]
    return stack(losses)


def aspo_weight(low: float, high: float, cap: float) -> Callable[[float, float, float, float], float]:
    def weight(ratio: float, advantage: float, *_: float) -> float:
        if advantage > 0:
            return 0.0 if ratio > 1 + high else min(1 / ratio, cap)
        return 0.0 if ratio < 1 - low else min(ratio, cap)

    return weight


def sapo_losses(b: Ragged, positive: float, negative: float) -> torch.Tensor:
    losses = []
    ratios = token_ratios(b)
    for s, row in b.rows():
        tau = positive if b.advantages_S[s] > 0 else negative
        losses += [-(4 / tau) / (1 + torch.exp(-tau * (ratios[t] - 1))) * b.advantages_S[s] * b.mask_T[t] for t in row]
    return stack(losses)


def binary_divergence(kind: str, log_p: float, log_q: float) -> float:
    """Return the divergence between "this token" and "any other"; it is infinite where p is 1 and q is not."""
    p, q = math.exp(min(log_p, 0)), math.exp(min(log_q, 0))
    if kind == "tv":
        return abs(p - q)
    if p in (0.0, 1.0):
        return 0.0 if p == q else math.inf
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


def dppo_weight(kind: str, threshold: float, cap: float) -> Callable[[float, float, float, float], float]:
    def weight(ratio: float, advantage: float, log_p: float, log_q: float) -> float:
        moves_away = ratio > 1 if advantage > 0 else ratio < 1
        is_masked = moves_away and binary_divergence(kind, log_p, log_q) > threshold
        return 0.0 if is_masked else min(ratio, cap)

    return weight
