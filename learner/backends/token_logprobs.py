"""Logprobs of given tokens out of hidden states, without holding all logits.

`token_logprobs` computes those of one token in each place, `candidate_logprobs` those of several candidates, and
`likeliest` a model's likeliest tokens.

T packed tokens, H model width, V rows of the output embedding on this rank, C tokens of a chunk. The forward pass
keeps one number a token (logsumexp); the backward pass computes each chunk's logits again, so that [T, V] numbers
never exist at once: at 16,384 tokens and a vocabulary of 150,000 they would fill 10 GB in fp32, several times. A caller
with memory to spare has them kept, in the products' dtype, where they are no more than a row's ordinary number.

Logits are read and written as rarely as possible: a GPU holds a chunk's numbers in the products' dtype only, and
computes on them in fp32 within one compiled kernel in the forward and one in the backward pass.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

LOGITS_PER_CHUNK = 1 << 29
"""The largest number of logits at once, 1 GiB in bfloat16: with fewer a GPU waits for the sum of the weight's
gradients. In the backward pass their gradient is as large."""

LOGITS_PER_CHUNK_ON_CPU = 1 << 25
"""The same number on a CPU, where every operation writes its result to memory: several times 128 MiB in fp32."""

KEPT_LOGITS = 3 << 30
"""The largest number of logits of a row that are kept for the backward pass, where the caller allows it: 6 GiB in
bfloat16 and 12 in float32. 16,384 tokens of a vocabulary of 150,000 are 4.6 GiB in bfloat16. Computing them again would
be a quarter of the head's operations, 6 % (Qwen3-1.7B) to 7 % (SmolLM2-135M) of those of all matrices."""

LARGE_GPU_BYTES = 120 * 10**9
"""A GPU with more memory keeps more logits. No card's memory lies close to it, by its name or as it reports it."""

KEPT_LOGITS_OF_LARGE = 6 << 30
"""The same number there: 32,768 tokens of a vocabulary of 150,000, which saved 3.6 % of an update of Qwen3-1.7B."""

KEPT_SHARE = 1 / 8
"""The largest share of a GPU's memory that they take, so that they leave one of less than 48 GiB its room for all else:
on one of 24 GiB 3 GiB."""

KEPT_LOGITS_ON_CPU = LOGITS_PER_CHUNK_ON_CPU
"""The same number on a CPU."""

COMPILED_ON = frozenset({"cuda"})
"""Devices on which operations over logits are compiled into one kernel."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """This rank's rows of the output embedding, the temperature, and the ranks that share the vocabulary."""

    temperature: float
    first: int
    """The token that the first row stands for."""
    num_real: int
    """The number of rows that belong to tokens; the rest is padding."""
    vocabulary: int
    """The number of tokens over all ranks."""
    chunk: int
    """The number of tokens in a chunk."""
    group: dist.ProcessGroup | None
    keeps: bool = False
    """Whether the logits are kept for the backward pass, not computed again."""

    def own(self, targets: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Return the row of each target, in the targets' shape; -1 if another rank holds it."""
        rows = targets - self.first
        return rows.where((rows >= 0) & (rows < num_rows), -1)

    def reduce(self, tensor: torch.Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduce in place over the ranks that share the vocabulary."""
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
    logits_per_chunk: int | None = None,
    keeps: bool = False,
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
        vocabulary: the number of tokens over all ranks; rows beyond are padding, of probability 0. None: all rows.
        keeps: keep the logits for the backward pass, which then computes none again, where `keeps_logits` allows it.
    """
    head = open_head(
        hidden_TH,
        weight_VH,
        temperature,
        group=group,
        first=first,
        vocabulary=vocabulary,
        logits_per_chunk=logits_per_chunk,
        keeps=keeps,
    )
    (logprobs_T,) = _TokenLogprobs.apply(hidden_TH, weight_VH, targets_T, head, False)  # type: ignore[no-untyped-call]
    found_T: torch.Tensor = logprobs_T
    return found_T


def confident_logprobs(
    hidden_TH: torch.Tensor, weight_VH: torch.Tensor, targets_T: torch.Tensor, temperature: float, **vocabulary: Any
) -> torch.Tensor:
    """[T, 3] what `token_logprobs` gives; the logprob of the likeliest of all tokens, which is the target's to the bit
    where that is the likeliest, without gradient; and the entropy of the distribution in nats.

    `vocabulary`: `group`, `first`, `vocabulary`, `logits_per_chunk` and `keeps` as in `token_logprobs`.
    """
    head = open_head(hidden_TH, weight_VH, temperature, **vocabulary)
    return torch.stack(_TokenLogprobs.apply(hidden_TH, weight_VH, targets_T, head, True), dim=1)  # type: ignore[no-untyped-call]


def open_head(
    hidden_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    temperature: float,
    *,
    group: dist.ProcessGroup | None = None,
    first: int = 0,
    vocabulary: int | None = None,
    logits_per_chunk: int | None = None,
    keeps: bool = False,
) -> Head:
    """Returns what computes these hidden states' logits in chunks; the arguments are those of `token_logprobs`."""
    num_rows = len(weight_VH)
    is_differentiated = torch.is_grad_enabled() and (hidden_TH.requires_grad or weight_VH.requires_grad)
    most = logits_per_chunk or (LOGITS_PER_CHUNK if hidden_TH.is_cuda else LOGITS_PER_CHUNK_ON_CPU)
    return Head(
        temperature=temperature,
        first=first,
        num_real=num_rows if vocabulary is None else min(max(vocabulary - first, 0), num_rows),
        vocabulary=num_rows if vocabulary is None else vocabulary,
        chunk=_even_chunk(len(hidden_TH), max(1, most // num_rows)),
        group=group,
        keeps=keeps and is_differentiated and _keeps(hidden_TH, num_rows),
    )


def keeps_logits(tokens: int, num_rows: int, *, number_bytes: int, on_cpu: bool, device_bytes: int | None) -> bool:
    """Return whether the logits of so many tokens are few enough to be kept.

    `number_bytes`: of one logit; `device_bytes`: a GPU's memory, None where that is not known. True then says that some
    GPU keeps them.
    """
    logits = tokens * num_rows
    if on_cpu:
        return logits <= KEPT_LOGITS_ON_CPU
    if device_bytes is None:
        return logits <= KEPT_LOGITS_OF_LARGE
    most = KEPT_LOGITS_OF_LARGE if device_bytes > LARGE_GPU_BYTES else KEPT_LOGITS
    return logits <= most and logits * number_bytes <= KEPT_SHARE * device_bytes


def _keeps(hidden_TH: torch.Tensor, num_rows: int) -> bool:
    device, on_cpu = hidden_TH.device, not hidden_TH.is_cuda
    device_bytes = None if on_cpu else torch.cuda.get_device_properties(device).total_memory
    number = hidden_TH.element_size()
    return keeps_logits(len(hidden_TH), num_rows, number_bytes=number, on_cpu=on_cpu, device_bytes=device_bytes)


class _TokenLogprobs(torch.autograd.Function):
    """Logprobs, and entropies, with a backward pass: with z the logits over the temperature and p = softmax(z[t]),

    d logprob[t] / d z[t, v] = (v == target[t]) - p[v]
    d entropy[t] / d z[t, v] = -p[v] * (log p[v] + entropy[t])
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_TH: torch.Tensor, weight_VH: torch.Tensor, targets_T: torch.Tensor, head: Head, confident: bool
    ) -> tuple[torch.Tensor, ...]:
        rows_T = head.own(targets_T, len(weight_VH))
        logsumexp_T, target_T, *of_all_T = (
            hidden_TH.new_empty(len(hidden_TH), dtype=_exact(hidden_TH)) for _ in range(4 if confident else 2)
        )
        kept: list[torch.Tensor] = []
        for part in chunks(len(hidden_TH), head.chunk):
            products_CV = hidden_TH[part] @ weight_VH.T
            kept += [products_CV] * head.keeps
            logsumexp_T[part], target_T[part] = _fused(_normalizer, products_CV, rows_T[part], head)
            if confident:
                largest_T, negentropy_T = of_all_T
                found = _fused(_spread, products_CV, rows_T[part], head, logsumexp_T[part])
                largest_T[part], negentropy_T[part] = found
        own_T, logsumexp_T = logsumexp_T, logsumexp_over_ranks(logsumexp_T, head)
        confidence = _confidence(of_all_T, own_T, logsumexp_T, head) if confident else ()
        ctx.mark_non_differentiable(*confidence[:1])
        ctx.save_for_backward(hidden_TH, weight_VH, rows_T, logsumexp_T, confidence[1] if confidence else None, *kept)
        ctx.head = head
        return head.reduce(target_T) - logsumexp_T, *confidence

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_T: torch.Tensor, _: torch.Tensor | None = None, grad_entropy_T: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None, None, None, None]:
        hidden_TH, weight_VH, rows_T, logsumexp_T, entropy_T, *kept = ctx.saved_tensors
        of_token = [logsumexp_T, grad_T]
        # Whether the loss reads the entropies is seen in their gradient, except on a GPU, for which one would wait.
        if entropy_T is not None and grad_entropy_T is not None and (grad_entropy_T.is_cuda or grad_entropy_T.any()):
            of_token += [entropy_T.detach(), grad_entropy_T]
        head: Head = ctx.head
        grad_hidden_TH = torch.empty_like(hidden_TH)
        # A frozen head has none.
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=logsumexp_T.dtype) if ctx.needs_input_grad[1] else None
        for number, part in enumerate(chunks(len(hidden_TH), head.chunk)):
            products_CV = kept[number] if head.keeps else hidden_TH[part] @ weight_VH.T
            grad_CV = _fused(_gradient, products_CV, rows_T[part], head, *(values_T[part] for values_T in of_token))
            torch.mm(grad_CV, weight_VH, out=grad_hidden_TH[part])
            if grad_weight_VH is not None:
                _add_product(grad_weight_VH, grad_CV.T, hidden_TH[part])
        grad_weight = None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype)
        return head.reduce(grad_hidden_TH), grad_weight, None, None, None


def _normalizer(
    products_CV: torch.Tensor, rows_C: torch.Tensor, temperature: float, num_real: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """[C] logsumexp of the logits, and [C] the target's logit; 0 if another rank holds it.

    The order of operations is one that the compiler knows as an online softmax, which reads the logits once.
    """
    logits_CV = logits_of(products_CV, temperature, num_real)
    max_C1 = logits_CV.amax(1, keepdim=True)
    sum_C1 = (logits_CV - max_C1).exp().sum(1, keepdim=True)
    target_C = logits_of(products_CV.gather(1, rows_C.clamp(min=0)[:, None]), temperature, num_real=1)[:, 0]
    return (sum_C1.log() + max_C1)[:, 0], target_C.where(rows_C >= 0, 0.0)


def _spread(
    products_CV: torch.Tensor, rows_C: torch.Tensor, temperature: float, num_real: int, logsumexp_C: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[C] the largest logit of this rank, and [C] the negative entropy of the distribution over its rows alone."""
    logits_CV = logits_of(products_CV, temperature, num_real)
    logprobs_CV = logits_CV - logsumexp_C[:, None]
    return logits_CV.amax(1), (logprobs_CV.exp() * logprobs_CV).sum(1)


def _confidence(
    of_rank_T: Sequence[torch.Tensor], own_T: torch.Tensor, logsumexp_T: torch.Tensor, head: Head
) -> tuple[torch.Tensor, ...]:
    """[T] the logprob of the likeliest token, and [T] the entropy: that of each rank's rows and of which rank holds the
    token. `of_rank_T`: what `_spread` gives; `own_T` and `logsumexp_T`: of this rank's rows and of all."""
    largest_T, negentropy_T = of_rank_T
    logshare_T = own_T - logsumexp_T
    entropy_T = -head.reduce(logshare_T.exp() * (negentropy_T + logshare_T))
    return head.reduce(largest_T, dist.ReduceOp.MAX) - logsumexp_T, entropy_T


def _gradient(
    products_CV: torch.Tensor,
    rows_C: torch.Tensor,
    temperature: float,
    num_real: int,
    logsumexp_C: torch.Tensor,
    grad_C: torch.Tensor,
    entropy_C: torch.Tensor | None = None,
    grad_entropy_C: torch.Tensor | None = None,
) -> torch.Tensor:
    """[C, V] gradient of the products, in their dtype; `grad_C` is that of the logprobs. The target is found by a
    comparison with the column, not by a scatter, so that all of it is one kernel."""
    probs_CV = (logits_of(products_CV, temperature, num_real) - logsumexp_C[:, None]).exp()
    is_target_CV = _columns(products_CV) == rows_C[:, None]
    scale_C1 = grad_C.to(logsumexp_C.dtype)[:, None] / temperature
    grad_CV = torch.where(is_target_CV, 1 - probs_CV, -probs_CV) * scale_C1
    if entropy_C is not None and grad_entropy_C is not None:
        scale_C1 = grad_entropy_C.to(entropy_C.dtype)[:, None] / temperature
        grad_CV -= (torch.xlogy(probs_CV, probs_CV) + probs_CV * entropy_C[:, None]) * scale_C1
    return grad_CV.to(products_CV.dtype)


def logits_of(products_CV: torch.Tensor, temperature: float, num_real: int) -> torch.Tensor:
    """[C, V] logits in fp32 (float64 for float64). Padding gets the least finite number, so that a rank that holds
    nothing else has a finite logsumexp."""
    logits_CV = products_CV.to(_exact(products_CV))
    if temperature != 1:
        logits_CV = logits_CV / temperature
    if num_real >= products_CV.shape[1]:
        return logits_CV
    return logits_CV.where(_columns(products_CV) < num_real, torch.finfo(logits_CV.dtype).min)


def _columns(products_CV: torch.Tensor) -> torch.Tensor:
    return torch.arange(products_CV.shape[1], device=products_CV.device)


def _fused(
    function: Callable[..., Any], products_CV: torch.Tensor, rows_C: torch.Tensor, head: Head, *more_C: torch.Tensor
) -> Any:
    """Call `function` on a GPU as a compiled kernel for chunks of any length, on a CPU as it is."""
    if products_CV.device.type in COMPILED_ON:
        function = _compiled(function)
        for tensor_C in (products_CV, rows_C, *more_C):
            torch._dynamo.maybe_mark_dynamic(tensor_C, 0)
    return function(products_CV, rows_C, head.temperature, head.num_real, *more_C)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def _add_product(sum_VH: torch.Tensor, left_VC: torch.Tensor, right_CH: torch.Tensor) -> None:
    """Add a product to the sum in place and in its dtype, without the product in memory where the device can."""
    if sum_VH.dtype == right_CH.dtype:
        sum_VH.addmm_(left_VC, right_CH)
    elif right_CH.is_cuda and _adds_exactly(right_CH.dtype, right_CH.device):
        torch.addmm(sum_VH, left_VC, right_CH, out_dtype=sum_VH.dtype, out=sum_VH)
    else:
        sum_VH.add_(left_VC @ right_CH)


@functools.cache
def _adds_exactly(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether this torch adds products of `dtype` to a sum in fp32; found by trying, since versions differ."""
    ones, total = torch.ones(16, 16, dtype=dtype, device=device), torch.ones(16, 16, device=device)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 17).all())


def _exact(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _even_chunk(length: int, most: int) -> int:
    """The length of a chunk so that chunks are few and equal: for few tokens a GPU reads the whole weight, too."""
    return max(1, math.ceil(length / max(1, math.ceil(length / most))))


def chunks(length: int, chunk: int) -> Iterator[slice]:
    return (slice(start, start + chunk) for start in range(0, length, chunk))


def logsumexp_over_ranks(logsumexp_T: torch.Tensor, head: Head) -> torch.Tensor:
    max_T = head.reduce(logsumexp_T.clone(), dist.ReduceOp.MAX)
    return head.reduce((logsumexp_T - max_T).exp_()).log_().add_(max_T)


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
