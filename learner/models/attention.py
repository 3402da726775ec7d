"""Causal attention over packed sequences, registered with transformers as "headway_packed".

transformers' own packed forward silently mixes sequences unless several options are set correctly. Here the boundaries
are an explicit argument: call the model with `packed_layout=PackedLayout.of(cu_seqlens)`, position ids that restart
with every sequence, `use_cache=False` and no attention mask.

Shapes: T packed tokens, S sequences, L longest of a bucket, H query heads, K key/value heads, D head width.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from headway.broker.errors import HeadwayError

from .flash_attention import LARGEST_WIDTH, flash_attention, is_available
from .tree_attention import Paths, TokenCopies, copied, end_run_places

ATTENTION_NAME = "headway_packed"

BUCKET_SPREAD = 1.5
"""The largest ratio of lengths of sequences that share a padded bucket."""

LENGTH_STEP = 1024
"""The longest sequence is rounded up to a multiple of this for the variable-length kernel, to avoid recompilation."""

WIDTH_STEP = 8
"""The kernels take heads whose width is a multiple of this."""

LONG = 256
"""The mean number of tokens of a sequence from which on flash-attn-4 is taken. On an H200 it is faster with 512, and
its forward pass slower with 114."""

KERNEL_OPTIONS = frozenset(inspect.signature(varlen_attn).parameters)
"""The arguments that the installed torch's kernel takes."""


class UnsupportedModelError(HeadwayError, NotImplementedError):
    """The model's attention is of a kind that packed rows do not support yet."""


@dataclass(frozen=True)
class Buckets:
    """A layout of sequences as padded rows; each bucket holds sequences of similar length."""

    shapes: tuple[tuple[int, int], ...]
    """(S, L) of every bucket."""
    gather: torch.Tensor
    """[sum of S * L] int64, the packed token at every padded place; padding repeats token 0."""
    places: torch.Tensor
    """[T] int64, the padded place of every packed token."""
    copies: TokenCopies | None = None
    """The places of each token's keys and values, if sequences share tokens; None: each lies in its place alone."""

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "Buckets":
        copies = None if self.copies is None else self.copies.moved(move)
        return replace(self, gather=move(self.gather), places=move(self.places), copies=copies)


class HeadExchange(Protocol):
    """Ranks, each with a part of the tokens, swap them for a part of the heads. Collective, differentiable."""

    def to_heads(self, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns all tokens of this rank's heads."""
        ...

    def to_tokens(self, rows_THD: torch.Tensor) -> torch.Tensor:
        """Returns all heads of this rank's tokens."""
        ...


@dataclass(frozen=True)
class PackedLayout:
    """The bounds of sequences, computed once for all layers of a forward pass."""

    cu_seqlens: torch.Tensor
    max_seqlen: int
    buckets: Buckets | None
    """The padded rows; None if the variable-length kernel is used."""
    exchange: HeadExchange | None = None
    """The exchange with the ranks that share a row; None if this rank has all tokens."""
    paths: Paths | None = None
    """The tokens that sequences share, for the variable-length kernel, where `cu_seqlens` bounds paths; None: they
    share nothing, or `buckets` say it."""
    is_long: bool = False
    """Whether a sequence or path has LONG tokens on average, from which on flash-attn-4 is the faster kernel."""
    on_attention: Callable[[torch.nn.Module], None] | None = None
    """Is told each module that asks `packed_attention`; None: they are not counted."""

    @classmethod
    def of(cls, cu_seqlens: torch.Tensor, *, varlen: bool = False) -> "PackedLayout":
        """Returns the layout of at least one sequence. `varlen`: use torch's kernel (CUDA, bfloat16 or float16).

        It reads the boundaries; call it with a tensor on the CPU and move the layout, to not wait for a GPU.
        """
        lengths = cu_seqlens.diff()
        buckets = None if varlen else plan_buckets(cu_seqlens)
        longest = int(lengths.max())
        return cls(cu_seqlens=cu_seqlens, max_seqlen=longest, buckets=buckets, is_long=is_long(cu_seqlens))

    @classmethod
    def of_paths(
        cls, cu_runs: torch.Tensor, cu_paths: torch.Tensor, paths: torch.Tensor, *, varlen: bool = False
    ) -> "PackedLayout":
        """Returns the layout of at least one run of a row whose sequences share beginnings; the tensors are those of
        `learner.batching.tree.PrefixTree`, on the CPU."""
        longest, copies = int(cu_paths.diff().max()), TokenCopies.of(cu_runs, cu_paths, paths)
        if varlen:
            found = Paths(cu_runs, int(cu_runs.diff().max()), paths, copies)
            return cls(cu_seqlens=cu_paths, max_seqlen=longest, buckets=None, paths=found, is_long=is_long(cu_paths))
        buckets = plan_buckets(cu_paths)
        buckets = Buckets(
            shapes=buckets.shapes,
            gather=paths[buckets.gather],
            places=buckets.places[end_run_places(cu_runs, cu_paths)],
            copies=copies.at(buckets.places),
        )
        return cls(cu_seqlens=cu_paths, max_seqlen=longest, buckets=buckets)

    def moved(
        self, move: Callable[[torch.Tensor], torch.Tensor], exchange: HeadExchange | None = None
    ) -> "PackedLayout":
        """Returns the layout with its tensors moved by `move`; attention then goes through `exchange`."""
        return replace(
            self,
            cu_seqlens=move(self.cu_seqlens),
            buckets=None if self.buckets is None else self.buckets.moved(move),
            exchange=exchange,
            paths=None if self.paths is None else self.paths.moved(move),
        )


def is_long(bounds: torch.Tensor) -> bool:
    """Returns whether sequences within bounds on the CPU, of at least one, have LONG tokens on average."""
    return int(bounds[-1]) >= LONG * (len(bounds) - 1)


def plan_buckets(cu_seqlens: torch.Tensor) -> Buckets:
    """Plans padded rows for sequences sorted by length, longest first, so that little of a row is padding."""
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    order = lengths.argsort(descending=True, stable=True)
    gathers, places = [], torch.empty(int(cu_seqlens[-1]), dtype=torch.int64, device=cu_seqlens.device)
    shapes: list[tuple[int, int]] = []
    base = 0
    for members in torch.split(order, _bucket_sizes(lengths[order].tolist())):
        longest = int(lengths[members[0]])
        columns = torch.arange(longest, device=cu_seqlens.device)
        tokens_SL, real_SL = starts[members, None] + columns, columns < lengths[members, None]
        gathers.append(tokens_SL.where(real_SL, 0).flatten())
        places[tokens_SL[real_SL]] = base + real_SL.flatten().nonzero().squeeze(1)
        shapes.append((len(members), longest))
        base += real_SL.numel()
    return Buckets(shapes=tuple(shapes), gather=torch.cat(gathers), places=places)


def _bucket_sizes(descending_lengths: list[int]) -> list[int]:
    sizes: list[int] = []
    longest = 0
    for length in descending_lengths:
        if not sizes or length * BUCKET_SPREAD < longest:
            sizes.append(0)
            longest = length
        sizes[-1] += 1
    return sizes


class _Pad(torch.autograd.Function):
    """Moves packed rows to padded places. Both directions are gathers; gradients of padding are dropped."""

    @staticmethod
    def forward(ctx: Any, rows_T: torch.Tensor, gather: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        return rows_T.index_select(0, gather)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return gradients[0].index_select(0, places), None, None


class RowsAt(torch.autograd.Function):
    """Picks the rows [M, ...] of [N, ...] at places [M]. Each gradient is copied, not added, to its place: places that
    are not picked get none, and a place that is picked twice has one of both."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.num_rows = len(rows)
        return rows.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (places,) = ctx.saved_tensors
        zeros = gradients[0].new_zeros(ctx.num_rows, *gradients[0].shape[1:])
        return zeros.index_copy_(0, places, gradients[0]), None


def bucketed_attention(
    query_THD: torch.Tensor, key_TKD: torch.Tensor, value_TKD: torch.Tensor, buckets: Buckets, scale: float
) -> torch.Tensor:
    """[T, H, D], exact on any device, in any dtype: padding stands after real keys, where causality hides it.

    Forward and backward of 256 sequences of 12 to 48 tokens on one core take a quarter of the time of a call of
    scaled_dot_product_attention for every sequence. Where sequences share tokens, T are the tokens of the row, and
    the queries of shared ones are computed again in each sequence, which keeps one of their outputs.
    """
    sizes = [size * longest for size, longest in buckets.shapes]
    padded = (_pad(query_THD, buckets), _pad_copies(key_TKD, buckets), _pad_copies(value_TKD, buckets))
    q, k, v = (torch.split(rows, sizes) for rows in padded)
    outputs = [_causal_rows(*parts, scale) for parts in zip(q, k, v, buckets.shapes, strict=True)]
    # Padding gets no gradient, or its queries would push real keys.
    attended: torch.Tensor = RowsAt.apply(torch.cat(outputs), buckets.places)  # type: ignore[no-untyped-call]
    return attended


_uncompiled_attention = torch.compiler.disable(bucketed_attention)  # type: ignore[no-untyped-call]
"""Not compiled, since its shapes are new with every batch."""


def _pad(rows_T: torch.Tensor, buckets: Buckets) -> torch.Tensor:
    padded: torch.Tensor = _Pad.apply(rows_T, buckets.gather, buckets.places)  # type: ignore[no-untyped-call]
    return padded


def _pad_copies(rows_T: torch.Tensor, buckets: Buckets) -> torch.Tensor:
    """Moves keys or values to all their places. (A query keeps the output of one place, so `_pad` is right for it.)"""
    return _pad(rows_T, buckets) if buckets.copies is None else copied(rows_T, buckets.gather, buckets.copies)


def _causal_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shape: tuple[int, int], scale: float
) -> torch.Tensor:
    q, k, v = (rows.view(*shape, *rows.shape[1:]).transpose(1, 2) for rows in (query, key, value))
    is_grouped = q.shape[1] != k.shape[1]
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=is_grouped)
    return attended.transpose(1, 2).flatten(0, 1)


def varlen_attention(
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    layout: PackedLayout,
    scale: float,
) -> torch.Tensor:
    """[T, H, D] with the width of the values, computed by a kernel for sequences of any lengths: flash-attn-4's, or
    torch's own. It counts causality from the end of a path, where the queries of its run stand."""
    cu_keys, paths = layout.cu_seqlens, layout.paths
    cu_queries, longest = cu_keys, _rounded(layout.max_seqlen)
    longest_run = longest
    if paths is not None:
        cu_queries, longest_run = paths.cu_runs, _rounded(paths.longest_run)
        key_TKD, value_TKD = (copied(rows, paths.index, paths.copies) for rows in (key_TKD, value_TKD))
    q, k, v = _of_one_width(query_THD, key_TKD, value_TKD)
    kernel = _flash_attention if _has_flash_attention(q) and layout.is_long else _torch_kernel
    return kernel(q, k, v, cu_queries, cu_keys, longest_run, longest, scale)[..., : value_TKD.shape[2]]


def _of_one_width(*rows_D: torch.Tensor) -> list[torch.Tensor]:
    """Puts zeros behind narrower heads, which change no product: attention over latent vectors has narrow values, and
    the kernels take one width."""
    width = -(-max(rows.shape[2] for rows in rows_D) // WIDTH_STEP) * WIDTH_STEP
    return [F.pad(rows, (0, width - rows.shape[2])) if rows.shape[2] < width else rows for rows in rows_D]


def _has_flash_attention(query_THD: torch.Tensor) -> bool:
    return query_THD.shape[2] <= LARGEST_WIDTH and is_available(query_THD.device)


def _flash_attention(query_THD: torch.Tensor, *others: Any) -> torch.Tensor:
    attended_THD: torch.Tensor
    attended_THD, _ = flash_attention(query_THD, *others)
    return attended_THD


def _torch_kernel(
    query_THD: torch.Tensor, key_TKD: torch.Tensor, value_TKD: torch.Tensor, *others: Any
) -> torch.Tensor:
    *bounds, scale = others
    options = _varlen_options(is_grouped=query_THD.shape[1] != key_TKD.shape[1])
    attended = varlen_attn(query_THD, key_TKD, value_TKD, *bounds, scale=scale, **options)
    assert isinstance(attended, torch.Tensor)
    return attended


@functools.cache
def check_alignment(device: torch.device) -> None:
    """Raises UnsupportedModelError unless the kernels count causality from the end of queries and keys, on which
    `PackedLayout.of_paths` relies: the only query of two tokens must attend to both."""
    query, key = (torch.zeros(length, 1, 64, dtype=torch.bfloat16, device=device) for length in (1, 2))
    cu_queries, cu_keys = (torch.tensor([0, length], dtype=torch.int32, device=device) for length in (1, 2))
    value = torch.arange(2, dtype=torch.bfloat16, device=device).view(2, 1, 1).expand(2, 1, 64).contiguous()
    kernels: dict[str, Callable[..., torch.Tensor]] = {f"torch {torch.__version__}": _torch_kernel}
    if _has_flash_attention(query):
        kernels["flash-attn-4"] = _flash_attention
    for name, kernel in kernels.items():
        mean = float(kernel(query, key, value, cu_queries, cu_keys, LENGTH_STEP, LENGTH_STEP, 1.0).float().mean())
        if abs(mean - 0.5) > 0.01:
            raise UnsupportedModelError(
                f"{name}'s variable-length attention on {device} does not count causality from the end of queries and"
                f" keys (the mean of 0 and 1 came out as {mean:.3f}), so tokens that samples share cannot be computed"
                " once. Set learner.prefix_sharing=never."
            )


def _rounded(length: int) -> int:
    return -(-length // LENGTH_STEP) * LENGTH_STEP


def _varlen_options(is_grouped: bool) -> dict[str, Any]:
    """Returns the kernel's options for causality and grouped heads, whose names depend on torch's version."""
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in KERNEL_OPTIONS else {"is_causal": True}
    return causal | ({"enable_gqa": is_grouped} if "enable_gqa" in KERNEL_OPTIONS else {})


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_layout: PackedLayout | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: [1, H, T, D] in, [1, T, H, D] out. The layout of a module that hands no
    further arguments on is its attribute `packed_layout`."""
    packed_layout = packed_layout or getattr(module, "packed_layout", None)
    if packed_layout is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} is not told the bounds of packed sequences, without which it would mix them: its"
            " model hands no arguments on to its layers. Take a model of another architecture."
        )
    if packed_layout.on_attention is not None:
        packed_layout.on_attention(module)
    _refuse_what_we_ignore(module, packed_layout, attention_mask, dropout, sliding_window, kwargs)
    q, k, v = (rows[0].transpose(0, 1) for rows in (query, key, value))
    scale = scaling if scaling is not None else q.shape[-1] ** -0.5
    exchange = packed_layout.exchange
    if exchange is None:
        return _attention(q, k, v, packed_layout, scale)[None], None
    q, k, v = exchange.to_heads(q, k, v)
    attended = _attention(q, k, v, packed_layout, scale)
    return exchange.to_tokens(attended)[None], None


def _attention(
    query_THD: torch.Tensor, key_TKD: torch.Tensor, value_TKD: torch.Tensor, layout: PackedLayout, scale: float
) -> torch.Tensor:
    if layout.buckets is None:
        return varlen_attention(query_THD, key_TKD, value_TKD, layout, scale)
    attended: torch.Tensor = _uncompiled_attention(query_THD, key_TKD, value_TKD, layout.buckets, scale)
    return attended


def check_layers_attend(layers: Sequence[torch.nn.Module], attending: set[torch.nn.Module], model_type: str) -> None:
    """Raises UnsupportedModelError unless each layer of a model asked `packed_attention` in its forward pass: one that
    did not has mixed the sequences of a row, or has no attention at all."""
    silent = [number for number, layer in enumerate(layers) if attending.isdisjoint(layer.modules())]
    if silent or not layers:
        which = f"{len(silent)} of its {len(layers)} layers, the first of them layer {silent[0]}," if silent else "it"
        raise UnsupportedModelError(
            f"model: Headway cannot train {model_type} with learner.backend=fsdp: {which} did not ask the attention"
            " function that keeps the sequences of a packed row apart, so that they would be trained with leaks. Take a"
            " model whose every layer attends by transformers' attention interface, such as llama or qwen3."
        )


def _refuse_what_we_ignore(
    module: torch.nn.Module,
    layout: PackedLayout,
    attention_mask: torch.Tensor | None,
    dropout: float,
    sliding_window: int | None,
    kwargs: dict[str, Any],
) -> None:
    """Raises UnsupportedModelError for an option that is not implemented and would silently give wrong logits."""
    window_matters = sliding_window is not None and sliding_window < layout.max_seqlen
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
        unknown.append("tokens that see later ones")
    if attention_mask is not None or dropout or window_matters or unknown:
        raise UnsupportedModelError(
            f"{ATTENTION_NAME} is plain causal attention, but the model wants a mask "
            f"({attention_mask is not None}), dropout ({dropout}), a window ({sliding_window}) below the "
            f"longest sequence ({layout.max_seqlen}), or {unknown}. Train a model with full attention and no dropout."
        )


def register_packed_attention() -> None:
    """Makes `config._attn_implementation = "headway_packed"` known to transformers.

    It has no entry among the functions that make masks. With one, transformers would look into the position ids of
    every forward pass for packed sequences, for which the process would wait for a GPU.
    """
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
