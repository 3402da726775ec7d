"""The parts of a layer that Megatron Core leaves to Transformer Engine, in plain torch.

Shapes: P tokens of a row, p = P / C those of one of C context ranks, H query heads, K key/value heads, D head width, E
experts of this rank, N tokens sent to them, W model width, F feed-forward width of this rank.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from torch.utils.checkpoint import checkpoint

from headway.learner.backends.moe import (
    collect,
    experts_forward,
    fused,
    gated,
    route,
    row_offsets,
    spread,
)
from headway.learner.models.attention import bucketed_attention, varlen_attention

from .row import MegatronRow


class RmsNorm(nn.Module):
    """RMSNorm over the last dimension, in fp32. Its gradient is summed over tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class PackedAttention(MegatronModule):
    """Rotary, causal attention within the sequences of a row.

    With context parallelism (Jacobs et al. 2023, "DeepSpeed Ulysses") ranks exchange tokens for heads before it and
    heads for tokens after it, so each attends over whole sequences.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(config=config)
        self._scale = softmax_scale or config.kv_channels**-0.5
        self._context = pg_collection.cp

    def forward(
        self,
        query_pHD: torch.Tensor,
        key_pKD: torch.Tensor,
        value_pKD: torch.Tensor,
        attention_mask: None = None,
        packed_seq_params: MegatronRow | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """[p, H * D] attention's output at this rank's tokens."""
        row = packed_seq_params
        assert row is not None
        assert row.layout is not None
        q, k, v = (self._whole_row(part) for part in (query_pHD, key_pKD, value_pKD))
        q, k = (fused(_rotated, part, row.cos_PD, row.sin_PD) for part in (q, k))
        if row.layout.buckets is None:
            attended = varlen_attention(q, k, v, row.layout, self._scale)
        else:
            attended = bucketed_attention(q, k, v, row.layout.buckets, self._scale)
        return self._own_tokens(attended).flatten(1)

    def _whole_row(self, part_pHD: torch.Tensor) -> torch.Tensor:
        """[P, H / C, D] this rank's heads of the whole row; key/value heads are repeated if there are fewer than
        ranks."""
        size = self._context.size()
        if size == 1:
            return part_pHD
        if repeats := max(1, size // part_pHD.shape[1]):
            part_pHD = part_pHD.repeat_interleave(repeats, 1)
        p, heads, width = part_pHD.shape
        by_rank = part_pHD.view(p, size, heads // size, width).transpose(0, 1)
        return _exchange(by_rank, self._context).flatten(0, 1)

    def _own_tokens(self, attended_PHD: torch.Tensor) -> torch.Tensor:
        """[p, H, D] all heads of this rank's tokens."""
        size = self._context.size()
        if size == 1:
            return attended_PHD
        by_rank = attended_PHD.view(size, -1, *attended_PHD.shape[1:])
        return _exchange(by_rank, self._context).transpose(0, 1).flatten(1, 2)


def _rotated(heads_PHD: torch.Tensor, cos_PD: torch.Tensor, sin_PD: torch.Tensor) -> torch.Tensor:
    """Rotate heads as in Su et al. 2021, "RoFormer", with the halves of a head as pairs."""
    first, second = heads_PHD.chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    cos, sin = cos_PD[:, None].to(heads_PHD.dtype), sin_PD[:, None].to(heads_PHD.dtype)
    return heads_PHD * cos + turned * sin


class _Exchange(torch.autograd.Function):
    """All-to-all of equal parts along the first dimension; backward is the same exchange."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        sent = parts.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Exchange.forward(ctx, gradients[0], ctx.group), None


def _exchange(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    received: torch.Tensor = _Exchange.apply(parts, group)  # type: ignore[no-untyped-call]
    return received


class GroupedExperts(MegatronModule):
    """This rank's experts, computed by two grouped matrix multiplications, with the changes of `adapter` if it has one.

    `allreduce = False` marks weights of expert-parallel ranks. `tensor_model_parallel` marks that every rank holds
    another part; without it the gradient norm counts one rank alone.
    """

    def __init__(self, num_local_experts: int, config: TransformerConfig, pg_collection: Any = None, **_: Any) -> None:
        super().__init__(config=config)
        width = config.moe_ffn_hidden_size // pg_collection.expt_tp.size()
        self.gate_up = self._weight(num_local_experts, 2 * width, config.hidden_size)
        self.down = self._weight(num_local_experts, config.hidden_size, width)
        self._recompute = config.recompute_granularity == "selective"

    def _weight(self, *shape: int) -> nn.Parameter:
        weight = nn.Parameter(torch.empty(shape, dtype=self.config.params_dtype))
        weight.allreduce = False  # type: ignore[attr-defined]
        weight.tensor_model_parallel = True  # type: ignore[attr-defined]
        weight.partition_dim, weight.partition_stride = 0, 1  # type: ignore[attr-defined]
        return weight

    def forward(
        self, tokens_NW: torch.Tensor, tokens_per_expert: torch.Tensor, probabilities_N: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """[N, W] each expert's output times its probability. Tokens are sorted by expert."""
        offsets_E = tokens_per_expert.to(tokens_NW.device, non_blocking=True).cumsum(0, dtype=torch.int32)
        return self.of_rows(tokens_NW, probabilities_N, offsets_E), None

    def of_rows(self, rows_NW: torch.Tensor, probabilities_N: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
        """[N, W] the same, given where each expert's rows end."""
        if not len(rows_NW):  # so that what is trained gets a gradient all the same
            trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
            return rows_NW + 0.0 * torch.stack([part.sum() for part in (*trained, probabilities_N)]).sum()
        gate = _gated_again if self._recompute else gated
        adapter: Any = getattr(self, "adapter", None)
        changes = (None, None) if adapter is None else (adapter.change("gate_up_proj"), adapter.change("down_proj"))
        return experts_forward(rows_NW, probabilities_N, offsets_E, self.gate_up, self.down, gate, changes)

    def backward_dw(self) -> None:
        """Do nothing: weight gradients are not delayed here."""


def _gated_again(hidden_N2F: torch.Tensor, probabilities_N: torch.Tensor) -> torch.Tensor:
    """Compute the gate; the backward pass computes it again, so that its result is not kept."""
    again: torch.Tensor = checkpoint(gated, hidden_N2F, probabilities_N, use_reentrant=False)
    return again


class ExpertLayer(MoELayer):
    """Router and experts. If one rank holds all experts whole, it dispatches nothing and never waits for the GPU."""

    def __init__(self, config: TransformerConfig, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self.register_buffer("load_E", torch.zeros(config.num_moe_experts), persistent=False)

    def route(self, hidden_states: torch.Tensor, *args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Route tokens, and count each expert's tokens once in every pass that is differentiated."""
        probabilities_TE, is_chosen_TE = super().route(hidden_states, *args, **options)
        if torch.is_grad_enabled():
            self.load_E += is_chosen_TE.sum(0)
        return probabilities_TE, is_chosen_TE

    def forward(self, hidden_states: torch.Tensor, *args: Any, **options: Any) -> tuple[torch.Tensor, None]:
        """[p, 1, W] the weighted sum of the chosen experts' outputs."""
        if self.config.expert_model_parallel_size > 1 or self.config.expert_tensor_parallel_size > 1:
            output: tuple[torch.Tensor, None] = super().forward(hidden_states, *args, **options)
            return output
        probabilities_TE, is_chosen_TE = self.route(hidden_states)
        experts_TK = chosen_experts(is_chosen_TE, self.config.moe_router_topk)
        routing = route(experts_TK)
        tokens_TW = hidden_states.flatten(0, -2)
        rows_NW = spread(tokens_TW, routing.sources_N, routing.places_TK)
        weights_N = probabilities_TE.gather(1, experts_TK).flatten()[routing.order_N]
        output_NW = self.experts.of_rows(rows_NW, weights_N, row_offsets(experts_TK, self.config.num_moe_experts))
        return collect(output_NW, routing.sources_N, routing.places_TK).view_as(hidden_states), None


def chosen_experts(is_chosen_TE: torch.Tensor, count: int) -> torch.Tensor:
    """[T, K] experts out of a router's map, without waiting for the GPU to count."""
    return is_chosen_TE.to(torch.uint8).topk(count, sorted=False).indices


def permute(
    tokens_TW: torch.Tensor,
    is_chosen_TE: torch.Tensor,
    probs: torch.Tensor | None = None,
    num_out_tokens: Any = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Megatron's `permute` with a gather as backward: experts' rows, their probabilities, the tokens they copy."""
    experts_TK = chosen_experts(is_chosen_TE, int(num_out_tokens) // len(tokens_TW))
    routing = route(experts_TK)
    rows_NW = spread(tokens_TW, routing.sources_N, routing.places_TK)
    weights_N = None if probs is None else probs.gather(1, experts_TK).flatten()[routing.order_N]
    return rows_NW, weights_N, routing.sources_N


def unpermute(rows_NW: torch.Tensor, sources_N: torch.Tensor, restore_shape: torch.Size, **_: Any) -> torch.Tensor:
    """Megatron's `unpermute` with a gather as forward: [T, W] sums of the rows that `permute` made."""
    places_TK = sources_N.argsort(stable=True).view(restore_shape[0], -1)
    return collect(rows_NW, sources_N, places_TK)
