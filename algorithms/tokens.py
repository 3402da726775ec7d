"""The data of packed tokens from which their loss is computed."""

from typing import NamedTuple

import torch


class Tokens(NamedTuple):
    """One micro-batch: the inputs of objectives and corrections besides the policy's logprobs."""

    behavior_logprobs_T: torch.Tensor
    """[T] log mu(y_t) under the weights that sampled the token; any value where the mask is 0."""
    advantages_T: torch.Tensor
    """[T] the advantage of the token's response, or of the token; any value where the mask is 0."""
    loss_mask_T: torch.Tensor
    """[T] 1 where the token is trained, else 0."""
    lags_T: torch.Tensor
    """[T] int64, versions between the weights that sampled the token and those that are trained."""
    cu_seqlens: torch.Tensor
    """[S + 1] where each sequence begins."""

    @property
    def trained_advantages(self) -> torch.Tensor:
        """[T] the advantages, and 0 where the mask is 0, so that they are safe to multiply with."""
        return torch.where(self.loss_mask_T > 0, self.advantages_T, torch.zeros_like(self.advantages_T))
