"""The output head's last mile: hidden states to the logprobs of given tokens, without holding all logits.

T packed tokens, H model width, V rows of the output embedding on this rank, C tokens of a chunk. The forward pass
keeps one number a token (logsumexp); the backward pass computes each chunk's logits again, so that [T, V] numbers
never exist at once: at 16,384 tokens and a vocabulary of 150,000 they would fill 10 GB in fp32, several times.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

LOGITS_PER_CHUNK = 1 << 28
"""At most so many logits exist at once, 1 GiB in fp32: fewer make a GPU wait for the sum of the weight's gradients."""


@dataclass(frozen=True, kw_only=True)
class _Head:
    """What turns a product with this rank's rows into logits."""

    temperature: float
    first: int
    """The token that the first row stands for."""
    num_real: int
    """Rows of real tokens; the rest is padding."""
    chunk: int
    """Tokens worked on at once."""
    group: dist.ProcessGroup | None

    def logits(self, hidden_CH: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
        """[C, V] of its own memory, in fp32 (float64 for float64)."""
        logits_CV = (hidden_CH @ weight_VH.T).to(_exact(hidden_CH))
        if self.temperature != 1:  # each pass over the logits costs
            logits_CV.div_(self.temperature)
        logits_CV[:, self.num_real :] = float("-inf")
        return logits_CV

    def own(self, targets_T: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[T] the row of each target, and whether it is one of this rank's; a stranger's row is any."""
        rows_T = targets_T - self.first
        return rows_T.clamp(0, num_rows - 1), (rows_T >= 0) & (rows_T < num_rows)

    def reduce(self, tensor: torch.Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        """In place, over the ranks that share the vocabulary."""
        if self.group is not None:
            dist.all_reduce(tensor, operation, group=self.group)
        return tensor


def token_logprobs(
    hidden_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_T: torch.Tensor,
    temperature: float,
    *,
    group: dist.ProcessGroup | None = None,
    first: int = 0,
    vocabulary: int | None = None,
    logits_per_chunk: int = LOGITS_PER_CHUNK,
) -> torch.Tensor:
    """[T] fp32 log softmax(hidden @ weight.T / temperature)[target]; float64 for float64.

    Products are computed in the dtype of `hidden` and `weight`, softmax in fp32, the weight's gradient is summed in
    fp32 over chunks.

    Args:
        targets_T: int64 tokens, numbered over the whole vocabulary.
        group: ranks that hold different rows of one vocabulary and the same `hidden` and `targets` (tensor
            parallelism); each gets all logprobs, and the gradient of `hidden` is summed over them. Its calls,
            backward passes too, are collective.
        first: the token that this rank's first row stands for.
        vocabulary: tokens there are, over all ranks; rows beyond are padding, of probability 0. None: all rows.
    """
    num_rows = len(weight_VH)
    num_real = num_rows if vocabulary is None else min(max(vocabulary - first, 0), num_rows)
    chunk = max(1, logits_per_chunk // num_rows)
    head = _Head(temperature=temperature, first=first, num_real=num_real, chunk=chunk, group=group)
    logprobs_T: torch.Tensor = _TokenLogprobs.apply(hidden_TH, weight_VH, targets_T, head)  # type: ignore[no-untyped-call]
    return logprobs_T


class _TokenLogprobs(torch.autograd.Function):
    """Of logits z over the temperature: d logprob[t] / d z[t, v] = (v == target[t]) - softmax(z[t])[v]."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TH: torch.Tensor, weight_VH: torch.Tensor, targets_T: torch.Tensor, head: _Head
    ) -> torch.Tensor:
        rows_T, is_own_T = head.own(targets_T, len(weight_VH))
        logsumexp_T, target_T = (hidden_TH.new_empty(len(hidden_TH), dtype=_exact(hidden_TH)) for _ in range(2))
        for part in _chunks(len(hidden_TH), head.chunk):
            logits_CV = head.logits(hidden_TH[part], weight_VH)
            target_T[part] = logits_CV.gather(1, rows_T[part, None])[:, 0]
            logsumexp_T[part] = _logsumexp_(logits_CV)
        logsumexp_T = _logsumexp_over_ranks(logsumexp_T, head)
        ctx.save_for_backward(hidden_TH, weight_VH, targets_T, logsumexp_T)
        ctx.head = head
        return head.reduce(target_T.where(is_own_T, 0.0)) - logsumexp_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        hidden_TH, weight_VH, targets_T, logsumexp_T = ctx.saved_tensors
        head: _Head = ctx.head
        rows_T, is_own_T = head.own(targets_T, len(weight_VH))
        scale_T = grad_T.to(logsumexp_T.dtype) / head.temperature
        grad_hidden_TH = torch.empty_like(hidden_TH)
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=logsumexp_T.dtype)
        for part in _chunks(len(hidden_TH), head.chunk):
            probs_CV = head.logits(hidden_TH[part], weight_VH).sub_(logsumexp_T[part, None]).exp_()
            grad_CV = probs_CV.mul_(-scale_T[part, None])
            grad_CV.scatter_add_(1, rows_T[part, None], (scale_T * is_own_T)[part, None])
            rounded_CV = grad_CV.to(hidden_TH.dtype)
            torch.mm(rounded_CV, weight_VH, out=grad_hidden_TH[part])
            grad_weight_VH.add_(rounded_CV.T @ hidden_TH[part])
        return head.reduce(grad_hidden_TH), grad_weight_VH.to(weight_VH.dtype), None, None


def _exact(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _chunks(length: int, chunk: int) -> Iterator[slice]:
    return (slice(start, start + chunk) for start in range(0, length, chunk))


def _logsumexp_(logits_CV: torch.Tensor) -> torch.Tensor:
    """[C], overwriting the logits: a copy of them would be the largest tensor of a step. -inf if all are padding."""
    max_C = logits_CV.amax(1).clamp(min=torch.finfo(logits_CV.dtype).min)
    return logits_CV.sub_(max_C[:, None]).exp_().sum(1).log_().add_(max_C)


def _logsumexp_over_ranks(logsumexp_T: torch.Tensor, head: _Head) -> torch.Tensor:
    max_T = head.reduce(logsumexp_T.clone(), dist.ReduceOp.MAX)
    return head.reduce((logsumexp_T - max_T).exp_()).log_().add_(max_T)
