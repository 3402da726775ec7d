"""The equations as naive float64 loops, one token after another."""

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
    return stack([clipped(ratios[t], b.advantages_S[s], low, high) for s, row in b.rows() for t in row])


def gspo_loss(b: Ragged, low: float, high: float) -> torch.Tensor:
    """Equation 5: the mean over sequences (with a trained token) of the clipped sequence surrogate."""
    ratios = geometric_means(b)
    terms = [clipped(ratios[s], b.advantages_S[s], low, high) for s, row in b.trained() if row]
    return sum(terms, 0 * ONE) / max(len(terms), 1)


def at_tokens(values_S: torch.Tensor, b: Ragged) -> torch.Tensor:
    return stack([values_S[s] for s, row in b.rows() for _ in row])
