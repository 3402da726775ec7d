"""All that stands in for the package flash-attn in verl: attention of packed rows, and logprobs of whole rows of
logits. verl imports this in every process that reads its model's configuration."""

from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from verl.utils import torch_functional

from . import verl_attention  # noqa: F401  # it registers the attention

ROWS = 8192
"""The most rows of logits that are in float32 at a time."""


def cross_entropy_loss(
    logits_TV: torch.Tensor, labels_T: torch.Tensor, **_options: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[T]: losses in float32, and nothing where flash-attn has those of the normalizer.

    Backward computes them again: the logits are kept as they came, as flash-attn keeps them.
    """
    chunks = zip(torch.split(logits_TV, ROWS), torch.split(labels_T, ROWS), strict=True)
    return torch.cat(
        [checkpoint(_losses, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    ), None


def _losses(logits_TV: torch.Tensor, labels_T: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits_TV.float(), labels_T, reduction="none")


# Without flash-attn verl has one softmax after another, for each token of its own: most of an update's time.
if not torch_functional.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE:
    torch_functional.cross_entropy_loss = cross_entropy_loss
    torch_functional.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE = True
