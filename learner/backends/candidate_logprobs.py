"""Logprobs of several candidates for each token, and a model's likeliest tokens, without holding all logits.

T packed tokens, H model width, V rows of the output embedding on this rank, K candidates of a token, C tokens of a
chunk. A student is trained on the candidates that its teacher found likeliest. As in `token_logprobs`, whose head this
shares, the backward pass computes each chunk's logits again; nothing is compiled.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from .token_logprobs import Head, chunks, logits_of, logsumexp_over_ranks, open_head


def candidate_logprobs(
    hidden_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    candidates_TK: torch.Tensor,
    temperature: float,
    **vocabulary: Any,
) -> torch.Tensor:
    """[T, 1 + K] fp32 (float64 for float64): the logprob of the likeliest of all tokens, without gradient, and log
    softmax(hidden @ weight.T / temperature) of each candidate.

    Args:
        candidates_TK: int64 tokens, numbered over the whole vocabulary. One may stand in a row several times.
        vocabulary: `group`, `first`, `vocabulary` and `logits_per_chunk` as in `token_logprobs`.
    """
    head = open_head(hidden_TH, weight_VH, temperature, **vocabulary)
    found_TK: torch.Tensor = _CandidateLogprobs.apply(hidden_TH, weight_VH, candidates_TK, head)  # type: ignore[no-untyped-call]
    return found_TK


def own_first(found_TK: torch.Tensor) -> torch.Tensor:
    """[T, 2 + C] of what `candidate_logprobs` gives for each token and its C candidates: the token's own logprob, then
    that of the likeliest token, then those of the candidates."""
    return torch.cat([found_TK[:, 1:2], found_TK[:, :1], found_TK[:, 2:]], dim=1)


@torch.no_grad()
def likeliest(
    hidden_TH: torch.Tensor, weight_VH: torch.Tensor, k: int, temperature: float, **vocabulary: Any
) -> torch.Tensor:
    """[T, K, 2] fp32: the K likeliest tokens, the first one first, each with its logprob.

    K is `k`, or the vocabulary where that is smaller. Token ids are below 2^24, which fp32 holds exactly. Ranks that
    share the vocabulary get the same result. `vocabulary`: as in `token_logprobs`.
    """
    head = open_head(hidden_TH, weight_VH, temperature, **vocabulary)
    own = min(k, len(weight_VH))
    logits_TK, ids_TK, logsumexp_T = [], [], []
    for part in chunks(len(hidden_TH), head.chunk):
        logits_CV = logits_of(hidden_TH[part] @ weight_VH.T, temperature, head.num_real)
        logsumexp_T.append(logits_CV.logsumexp(1))
        best_CK = logits_CV.topk(own, dim=1)
        logits_TK.append(best_CK.values)
        ids_TK.append(best_CK.indices + head.first)
    whole_T = logsumexp_over_ranks(torch.cat(logsumexp_T), head)
    values_TK, tokens_TK = _of_all_ranks(torch.cat(logits_TK), head), _of_all_ranks(torch.cat(ids_TK), head)
    order_TK = values_TK.sort(dim=1, descending=True, stable=True).indices[:, : min(k, head.vocabulary)]
    found_TK = values_TK.gather(1, order_TK) - whole_T[:, None]
    return torch.stack([tokens_TK.gather(1, order_TK).float(), found_TK.float()], dim=-1)


def _of_all_ranks(values_TK: torch.Tensor, head: Head) -> torch.Tensor:
    """[T, ranks * K] the columns of all ranks that share the vocabulary, in their order."""
    if head.group is None:
        return values_TK
    parts = [torch.empty_like(values_TK) for _ in range(head.group.size())]
    dist.all_gather(parts, values_TK.contiguous(), group=head.group)
    return torch.cat(parts, dim=1)


class _CandidateLogprobs(torch.autograd.Function):
    """Logprobs with a backward pass: with z the logits over the temperature,
    d logprob[t, k] / d z[t, v] = (v == candidate[t, k]) - softmax(z[t])[v]."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TH: torch.Tensor, weight_VH: torch.Tensor, candidates_TK: torch.Tensor, head: Head
    ) -> torch.Tensor:
        rows_TK = head.own(candidates_TK, len(weight_VH))
        exact = torch.promote_types(hidden_TH.dtype, torch.float32)
        logsumexp_T, largest_T = (hidden_TH.new_empty(len(hidden_TH), dtype=exact) for _ in range(2))
        found_TK = hidden_TH.new_empty(rows_TK.shape, dtype=exact)
        for part in chunks(len(hidden_TH), head.chunk):
            logits_CV = logits_of(hidden_TH[part] @ weight_VH.T, head.temperature, head.num_real)
            logsumexp_T[part], largest_T[part] = logits_CV.logsumexp(1), logits_CV.amax(1)
            found_TK[part] = logits_CV.gather(1, rows_TK[part].clamp(min=0)).where(rows_TK[part] >= 0, 0.0)
        logsumexp_T = logsumexp_over_ranks(logsumexp_T, head)
        ctx.save_for_backward(hidden_TH, weight_VH, rows_TK, logsumexp_T)
        ctx.head = head
        logits_T1K = torch.cat([head.reduce(largest_T, dist.ReduceOp.MAX)[:, None], head.reduce(found_TK)], dim=1)
        return logits_T1K - logsumexp_T[:, None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T1K: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        hidden_TH, weight_VH, rows_TK, logsumexp_T = ctx.saved_tensors
        head: Head = ctx.head
        grad_TK = grad_T1K[:, 1:].to(logsumexp_T.dtype) / head.temperature
        grad_hidden_TH = torch.empty_like(hidden_TH)
        # A frozen head has none.
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=logsumexp_T.dtype) if ctx.needs_input_grad[1] else None
        for part in chunks(len(hidden_TH), head.chunk):
            logits_CV = logits_of(hidden_TH[part] @ weight_VH.T, head.temperature, head.num_real)
            grad_CV = (logits_CV - logsumexp_T[part, None]).exp_().mul_(-grad_TK[part].sum(1, keepdim=True))
            is_own_CK = rows_TK[part] >= 0
            grad_CV.scatter_add_(1, rows_TK[part].clamp(min=0), grad_TK[part].where(is_own_CK, 0.0))
            grad_CV = grad_CV.to(hidden_TH.dtype)
            torch.mm(grad_CV, weight_VH, out=grad_hidden_TH[part])
            if grad_weight_VH is not None:
                grad_weight_VH.add_(grad_CV.T @ hidden_TH[part])
        grad_weight = None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype)
        return head.reduce(grad_hidden_TH), grad_weight, None, None
