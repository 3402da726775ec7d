"""What is known of packed tokens before their loss."""

from typing import NamedTuple

import torch


class Tokens(NamedTuple):
    """One micro-batch: whatever an objective or a correction may look at, besides the policy's logprobs."""

    behavior_logprobs_T: torch.Tensor
    """[T] log mu(y_t), of the weights that sampled the token; anything where the mask is 0."""
    advantages_T: torch.Tensor
    """[T] of the token's response, or of the token; anything where the mask is 0."""
    loss_mask_T: torch.Tensor
    """[T] 1 where the token is trained, else 0."""
    lags_T: torch.Tensor
    """[T] int64, versions between the weights that sampled the token and those that are trained."""
    cu_seqlens: torch.Tensor
    """[S + 1] where each sequence begins."""

    @property
    def trained_advantages(self) -> torch.Tensor:
        """[T] the advantages, and 0 where the mask is 0: what may be multiplied with."""
        return torch.where(self.loss_mask_T > 0, self.advantages_T, torch.zeros_like(self.advantages_T))
