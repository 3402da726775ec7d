"""The data of packed tokens from which their loss is computed, and sums, means and broadcasts over the sequences of a
packed row.
"""

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


def lengths(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """[S] int64, tokens of each sequence."""
    return cu_seqlens.diff().long()


def sequence_of_token(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """[T] int64, the index of the sequence that each token belongs to."""
    lengths_S = lengths(cu_seqlens)
    return torch.arange(lengths_S.numel(), device=cu_seqlens.device).repeat_interleave(lengths_S)


def trained(values_T: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    """[T] the values where the mask is 1; 0 and no gradient elsewhere, whatever stands there."""
    return torch.where(mask_T > 0, values_T, torch.zeros_like(values_T))


def segment_sum(values_T: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """[S] sum of `values_T` over each sequence; 0 for one without tokens."""
    sums_S = values_T.new_zeros(cu_seqlens.numel() - 1)
    return sums_S.index_add(0, sequence_of_token(cu_seqlens), values_T)


def segment_mean(values_T: torch.Tensor, mask_T: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """[S] mean of `values_T` over each sequence's tokens with mask 1; 0 where there are none."""
    counts_S = segment_sum(mask_T.to(values_T.dtype), cu_seqlens)
    return segment_sum(trained(values_T, mask_T), cu_seqlens) / counts_S.clamp(min=1)


def spread(values_S: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """[T] each sequence's value at each of its tokens."""
    return values_S[sequence_of_token(cu_seqlens)]
