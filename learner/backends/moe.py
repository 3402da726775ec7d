"""Experts as two grouped multiplications over rows sorted by expert; both directions of every move are gathers.

`RecordedExperts` replaces a router's choice by the one that a batch brings along.

Autograd turns the gather that gives each expert its tokens into a scatter with atomic additions on the way back; here
the inverse permutation is known, so what would be scattered is gathered and summed, in a fixed order.

T tokens, K experts chosen for each, N = T * K rows, E experts, H model width, F expert width; of an adapter R rank, I
input and O output features.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

EVEN_RANK = 8
"""Grouped multiplications take rows of 16 bytes and their multiples: other ranks are filled up with zeros."""


class ExpertRows(NamedTuple):
    """The order of the rows: which token each row copies, and for which of its experts."""

    order_N: torch.Tensor
    """The flat index into [T, K] of the choice that each row stands for; rows of an expert follow one another."""
    sources_N: torch.Tensor
    """The token that each row copies."""
    places_TK: torch.Tensor
    """The row that stands for each choice."""


def route(experts_TK: torch.Tensor) -> ExpertRows:
    """Rows sorted by expert, and within an expert by token."""
    chosen = experts_TK.shape[1]
    order_N = experts_TK.flatten().argsort(stable=True)
    places_N = torch.empty_like(order_N)
    places_N[order_N] = torch.arange(len(order_N), device=order_N.device)
    return ExpertRows(order_N, order_N // chosen, places_N.view_as(experts_TK))


def row_offsets(experts_TK: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[E] int32, where each expert's rows end."""
    ones_N = torch.ones_like(experts_TK.flatten(), dtype=torch.int32)
    counts_E = ones_N.new_zeros(num_experts).index_add_(0, experts_TK.flatten(), ones_N)
    return counts_E.cumsum(0, dtype=torch.int32)


def spread(tokens_TH: torch.Tensor, sources_N: torch.Tensor, places_TK: torch.Tensor) -> torch.Tensor:
    """[N, H] each row a copy of its token."""
    rows_NH: torch.Tensor = _Spread.apply(tokens_TH, sources_N, places_TK)  # type: ignore[no-untyped-call]
    return rows_NH


def collect(rows_NH: torch.Tensor, sources_N: torch.Tensor, places_TK: torch.Tensor) -> torch.Tensor:
    """[T, H] each token the sum of its rows."""
    tokens_TH: torch.Tensor = _Collect.apply(rows_NH, sources_N, places_TK)  # type: ignore[no-untyped-call]
    return tokens_TH


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, sources: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        return tokens.index_select(0, sources)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return fused(_sums, gradients[0], ctx.saved_tensors[0]), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sources: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(sources)
        return fused(_sums, rows, places)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradients[0].index_select(0, ctx.saved_tensors[0]), None, None


def _sums(rows_NH: torch.Tensor, places_TK: torch.Tensor) -> torch.Tensor:
    return rows_NH[places_TK].sum(1)


def gated(hidden_N2F: torch.Tensor, weights_N: torch.Tensor) -> torch.Tensor:
    """[N, F] silu(gate) * up * weight, rounded once."""
    return fused(_gated, hidden_N2F, weights_N)


def _gated(hidden_N2F: torch.Tensor, weights_N: torch.Tensor) -> torch.Tensor:
    gate, up = hidden_N2F.chunk(2, -1)
    return (F.silu(gate.float()) * up * weights_N[:, None]).to(hidden_N2F.dtype)


def grouped_product(rows_NI: torch.Tensor, weights_EOI: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
    """[N, O] each row times its expert's matrix, transposed."""
    return F.grouped_mm(rows_NI, weights_EOI.transpose(1, 2), offs=offsets_E)


class ExpertChange(NamedTuple):
    """An adapter of one tensor of experts: each expert's matrix becomes W + scale * B A."""

    first_ERI: torch.Tensor
    second_EOR: torch.Tensor
    scale: float


def experts_forward(
    rows_NH: torch.Tensor,
    weights_N: torch.Tensor,
    offsets_E: torch.Tensor,
    gate_up_E2FH: torch.Tensor,
    down_EHF: torch.Tensor,
    gate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = gated,
    changes: tuple[ExpertChange | None, ExpertChange | None] = (None, None),
    product: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = grouped_product,
) -> torch.Tensor:
    """[N, H] the output of each row's expert, times the row's weight. Experts without rows get gradients of zero.
    `changes` are those of gate_up and of down."""

    def changed(rows_N: torch.Tensor, weights_E: torch.Tensor, change: ExpertChange | None) -> torch.Tensor:
        output_N = product(rows_N, weights_E, offsets_E)
        if change is None:
            return output_N
        first, second = _even(change)
        return output_N + product(product(rows_N, first, offsets_E), second, offsets_E) * change.scale

    hidden_N2F = changed(rows_NH, gate_up_E2FH, changes[0])
    return changed(gate(hidden_N2F, weights_N), down_EHF, changes[1])


def _even(change: ExpertChange) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A and B of a rank that grouped multiplications take."""
    first, second, _ = change
    if missing := -first.shape[1] % EVEN_RANK:
        return F.pad(first, (0, 0, 0, missing)), F.pad(second, (0, missing))
    return first, second


def grouped_experts(
    tokens_TH: torch.Tensor,
    experts_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    gate_up_E2FH: torch.Tensor,
    down_EHF: torch.Tensor,
) -> torch.Tensor:
    """[T, H] sum over the chosen experts of weight * down(silu(gate(x)) * up(x)), where all experts are here.

    The weight is applied before the last product, which is linear: it then scales rows of width F, not H.
    """
    routing = route(experts_TK)
    rows_NH = spread(tokens_TH, routing.sources_N, routing.places_TK)
    weights_N = weights_TK.flatten()[routing.order_N]
    offsets_E = row_offsets(experts_TK, len(gate_up_E2FH))
    output_NH = experts_forward(rows_NH, weights_N, offsets_E, gate_up_E2FH, down_EHF)
    return collect(output_NH, routing.sources_N, routing.places_TK)


def fused(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """Call `function` as one compiled kernel on a GPU; within a compiled region, and on a CPU, as it is.

    Compiled once for every number of rows: only the first dimension may vary, the others are built into the kernel.
    """
    if not tensors[0].is_cuda or torch.compiler.is_compiling():
        return function(*tensors)
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return _compiled(function)(*tensors)


@functools.cache
def _compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return torch.compile(function)


@dataclass(frozen=True)
class RecordedExperts:
    """The recorded choices of one layer or of all, and a count of those that the learner's router disagrees with."""

    experts_NLK: torch.Tensor
    """[N, L, K], or [N, K] for one layer; -1 where the router chooses for itself."""
    tally_2: torch.Tensor
    """int64 counts: recorded choices that the learner's own router would not have made; all recorded choices."""
    shares_N: torch.Tensor | None = None
    """[N] int64 the number of sequences for which a token is computed, each of which counts; None: one."""

    def of_layer(self, layer: int) -> "RecordedExperts":
        """The choices of the layer that is number `layer` among those with experts."""
        return RecordedExperts(self.experts_NLK[:, layer], self.tally_2, self.shares_N)

    def part(self, take: Callable[[torch.Tensor], torch.Tensor]) -> "RecordedExperts":
        """The choices of the tokens that `take` selects."""
        return RecordedExperts(
            take(self.experts_NLK), self.tally_2, None if self.shares_N is None else take(self.shares_N)
        )

    def instead_of(self, own_NK: torch.Tensor) -> torch.Tensor:
        """[N, K] int64: the recorded experts, else `own_NK`. Counts disagreement if gradients are enabled."""
        recorded_NK = self.experts_NLK.to(own_NK.dtype)
        is_recorded_NK = recorded_NK >= 0
        if torch.is_grad_enabled():
            is_own_NK = (recorded_NK[:, :, None] == own_NK[:, None, :]).any(-1)
            counted_NK = is_recorded_NK * (1 if self.shares_N is None else self.shares_N[:, None])
            self.tally_2.add_(torch.stack([(counted_NK * ~is_own_NK).sum(), counted_NK.sum()]))
        return torch.where(is_recorded_NK, recorded_NK, own_NK)


def disagreement(tally_2: torch.Tensor) -> dict[str, float]:
    """The entries of a batch's report; {} if no choice was replayed. Waits for the device."""
    different, replayed = tally_2.tolist()
    if not replayed:
        return {}
    return {"router_disagreement_sum": float(different), "router_disagreement_count": float(replayed)}
