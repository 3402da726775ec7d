"""This rank's part of the model: Megatron's decoder with our modules in it, and a head that gives logprobs.

Routers may take recorded experts in the place of their own choice, and count how evenly tokens are spread.

P tokens of a padded row, p those of this context rank, W model width, K candidates in the place of a token.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from headway.learner.backends.moe import RecordedExperts
from headway.learner.backends.token_logprobs import (
    candidate_logprobs,
    confident_logprobs,
    likeliest,
    own_first,
    token_logprobs,
)
from headway.learner.config import ComputeConfig, LayoutConfig

from . import groups
from .mapping import Architecture
from .modules import ExpertLayer, GroupedExperts, PackedAttention, RmsNorm, permute, unpermute
from .row import MegatronRow

if TYPE_CHECKING:
    from transformers import PretrainedConfig


if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None  # Megatron 0.16 reads this name, and defines it only with Transformer Engine
token_dispatcher.permute, token_dispatcher.unpermute = permute, unpermute


class PackedGpt(GPTModel):
    """A pipeline stage. The last stage returns the result of `head` on the final hidden states."""

    architecture: Architecture

    def _preprocess(self, input_ids: torch.Tensor, *args: Any, **options: Any) -> tuple[torch.Tensor | None, ...]:
        """Embed tokens, with a gradient even where none is to be trained."""
        embedded, *rest = super()._preprocess(input_ids, *args, **options)
        if embedded is not None and torch.is_grad_enabled() and not embedded.requires_grad:
            # The embedding is frozen. Recomputed layers, and stages without an adapter, pass on gradients all the same.
            embedded = embedded.detach().requires_grad_()
        return embedded, *rest

    def _postprocess(self, hidden_states: torch.Tensor, packed_seq_params: MegatronRow, **_: Any) -> torch.Tensor:
        if not self.post_process:
            return hidden_states
        hidden_pW = hidden_states[:, 0]
        if self.config.sequence_parallel:
            # Every tensor-parallel rank computes the whole gradient of what is gathered here.
            hidden_pW = gather_from_sequence_parallel_region(hidden_pW, tensor_parallel_output_grad=False)
        return self.head(hidden_pW, packed_seq_params)

    def head(self, hidden_pW: torch.Tensor, row: MegatronRow) -> torch.Tensor:
        """[T] logprobs of the row's tokens, or values, 0 for the first of a sequence; the same on every rank of the
        stage.

        [T, 2 + K] or [T, 3] as `PackedBatch` says; [T, K, 2] if the row wants its K likeliest tokens."""
        context = groups.context()
        if row.wants_hidden:
            return gathered(hidden_pW, context)[: row.num_tokens]
        next_P = gathered(self.next_outputs(hidden_pW, row), context)
        return row.at_next_token(next_P)

    def next_outputs(self, hidden_pW: torch.Tensor, row: MegatronRow) -> torch.Tensor:
        """[p] for each token the logprob of the one that follows; with candidates, or of the likeliest, as `head`."""
        group, context = groups.tensor(), groups.context()
        targets_P = row.next_ids_P
        if row.next_candidates_PK is not None:
            targets_P = torch.cat([targets_P[:, None], row.next_candidates_PK], dim=1)
        targets_p = row.part(targets_P, context.rank(), context.size())
        tied = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        weight = tied if tied is not None else self.output_layer.weight
        vocabulary: dict[str, Any] = {
            "group": group if group.size() > 1 else None,
            "first": group.rank() * weight.shape[0],
            "vocabulary": self.architecture.vocabulary,
        }
        if row.top:
            return likeliest(hidden_pW, weight, row.top, row.temperature, **vocabulary)
        if row.next_candidates_PK is not None:
            return own_first(candidate_logprobs(hidden_pW, weight, targets_p, row.temperature, **vocabulary))
        logprobs = confident_logprobs if row.wants_confidence else token_logprobs
        return logprobs(hidden_pW, weight, targets_p, row.temperature, **vocabulary)


class PackedValues(PackedGpt):
    """A pipeline stage of a model with a head of one output, which every rank of the last stage holds whole."""

    def __init__(self, *, has_bias: bool, **options: Any) -> None:
        super().__init__(**options)
        if self.post_process:
            del self.output_layer
            dtype = self.config.params_dtype
            self.value_head = nn.Linear(self.config.hidden_size, 1, bias=has_bias, dtype=dtype)

    def next_outputs(self, hidden_pW: torch.Tensor, row: MegatronRow) -> torch.Tensor:
        """[p] fp32 values of the state behind each token."""
        bias = None if self.value_head.bias is None else self.value_head.bias.float()
        return F.linear(hidden_pW.float(), self.value_head.weight.float(), bias)[:, 0]


class _Gathered(torch.autograd.Function):
    """All ranks' parts, one after the other. Ranks derive the same loss from it, so backward takes a rank's own
    part."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        whole = part.new_empty(group.size() * len(part), *part.shape[1:])
        torch.distributed.all_gather(list(whole.chunk(group.size())), part.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0].chunk(ctx.group.size())[ctx.group.rank()], None


def gathered(part: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    """[C * p, ...] all ranks' parts, each [p, ...]; differentiable."""
    if group.size() == 1:
        return part
    whole: torch.Tensor = _Gathered.apply(part, group)  # type: ignore[no-untyped-call]
    return whole


def transformer_config(
    architecture: Architecture, layout: LayoutConfig, compute: ComputeConfig, dtype: torch.dtype, device: torch.device
) -> TransformerConfig:
    """Return Megatron's configuration. Gradients are sums over micro-batches, not divided by tokens or ranks."""
    is_gpu = device.type == "cuda"
    options: dict[str, Any] = {}
    if architecture.experts:
        options |= {
            "num_moe_experts": architecture.experts,
            "moe_router_topk": architecture.experts_per_token,
            "moe_ffn_hidden_size": architecture.ffn_width,
            "moe_router_pre_softmax": not architecture.has_normalized_gates,
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32" if dtype is not torch.float32 else None,
        }
    if layout.virtual_pipeline > 1:
        # Two stages exchange activations and gradients at once. Only calls that are not batched keep them apart, and
        # Megatron would batch the calls that exchange shapes.
        options |= {
            "virtual_pipeline_model_parallel_size": layout.virtual_pipeline,
            "batch_p2p_comm": False,
            "overlap_p2p_comm": True,
        }
    if compute.recompute == "full":
        options |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif compute.recompute == "selective":
        options |= {"recompute_granularity": "selective", "recompute_modules": [] if architecture.experts else ["mlp"]}
    return TransformerConfig(
        num_layers=architecture.layers,
        hidden_size=architecture.width,
        ffn_hidden_size=architecture.ffn_width,
        num_attention_heads=architecture.heads,
        num_query_groups=architecture.key_value_heads,
        kv_channels=architecture.head_width,
        qk_layernorm=architecture.has_qk_norm,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_epsilon,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=architecture.has_qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tensor,
        sequence_parallel=layout.tensor > 1,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        variable_seq_lengths=layout.virtual_pipeline == 1,
        moe_token_dispatcher_type="alltoall",
        calculate_per_token_loss=True,
        finalize_model_grads_func=lambda models, num_tokens=None, **options: finalize_model_grads(models, **options),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=not is_gpu,
        perform_initialization=False,
        bias_activation_fusion=is_gpu,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        deallocate_pipeline_outputs=False,
        **options,
    )


def build(config: TransformerConfig, architecture: Architecture, device: torch.device) -> list[PackedGpt]:
    """Return the stage's chunks, one for each run of layers that it interleaves, with undefined weights."""
    sizes = config.virtual_pipeline_model_parallel_size
    chunks = [_part(config, architecture, stage if sizes else None).to(device) for stage in range(sizes or 1)]
    for chunk in chunks:
        _mark_parts(chunk)
    return chunks


def _mark_parts(chunk: PackedGpt) -> None:
    """Mark split parameters as Megatron's initialization does: else a gradient's norm counts one rank alone."""
    for module in chunk.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding):
            for parameter in module.parameters(recurse=False):
                if not hasattr(parameter, "tensor_model_parallel"):  # biases are marked as they are made
                    set_tensor_model_parallel_attributes(parameter, True, int(isinstance(module, RowParallelLinear)), 1)


def _part(config: TransformerConfig, architecture: Architecture, stage: int | None) -> PackedGpt:
    vocabulary = architecture.vocabulary
    kind: Callable[..., PackedGpt] = PackedGpt
    if architecture.head != "policy":
        kind = functools.partial(PackedValues, has_bias=architecture.head == "value")
    model = kind(
        config=config,
        transformer_layer_spec=_layers(config, stage),
        vocab_size=vocabulary + -vocabulary % config.tensor_model_parallel_size,
        max_sequence_length=1,  # nothing is learned by position
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        parallel_output=True,
        share_embeddings_and_output_weights=architecture.has_tied_head,
        position_embedding_type="none",
        vp_stage=stage,
    )
    model.architecture = architecture
    return model


def _layers(config: TransformerConfig, stage: int | None) -> TransformerBlockSubmodules:
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RmsNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RmsNorm
    if config.num_moe_experts:
        spec.module = ReplayingLayer
        parts.mlp.module = ExpertLayer
        parts.mlp.submodules.experts = ModuleSpec(module=GroupedExperts)
    return TransformerBlockSubmodules(
        layer_specs=[spec] * get_num_layers_to_build(config, vp_stage=stage), layer_norm=RmsNorm
    )


def rotary_module(config: "PretrainedConfig") -> nn.Module:
    """Return transformers' own rotary module for this model, with the scaling of its configuration."""
    from transformers import AutoModelForCausalLM

    source = sys.modules[AutoModelForCausalLM._model_mapping[type(config)].__module__]
    kind = next(value for name, value in vars(source).items() if name.endswith("RotaryEmbedding"))
    module: nn.Module = kind(config)
    return module


class RouterReplay:
    """Megatron's router asks this object for the experts of its tokens.

    Megatron's own class for it keeps one list in the whole process. With several micro-batches in the pipeline the
    list would need to know, between a forward pass and its recomputation, which micro-batch comes next.
    """

    recorded: RecordedExperts | None = None

    def get_replay_topk(
        self,
        scores_NE: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        choose: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ([N, K] scores, [N, K] experts) of the experts to take."""
        own: tuple[torch.Tensor, torch.Tensor] = choose(scores_NE, topk, num_groups=num_groups, group_topk=group_topk)
        if self.recorded is None:
            return own
        experts_NK = self.recorded.instead_of(own[1])
        return scores_NE.gather(1, experts_NK), experts_NK


class ReplayingLayer(TransformerLayer):
    """A decoder layer whose router replays what its row says, in the pass that recomputes it too."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.mlp.router.router_replay = self.replay = RouterReplay()

    def forward(self, *args: Any, packed_seq_params: MegatronRow, **options: Any) -> tuple[torch.Tensor, Any]:
        """Compute the layer as Megatron does, with the row's recorded experts."""
        recorded = packed_seq_params.recorded
        self.replay.recorded = None if recorded is None else self._own(recorded, packed_seq_params)
        output: tuple[torch.Tensor, Any] = super().forward(*args, packed_seq_params=packed_seq_params, **options)
        return output

    def _own(self, recorded: RecordedExperts, row: MegatronRow) -> RecordedExperts:
        """The recorded choices of this layer, for the tokens that this rank's router sees."""
        splits = [groups.context()] + ([groups.tensor()] if self.config.sequence_parallel else [])
        for group in splits:
            recorded = recorded.part(functools.partial(row.part, rank=group.rank(), size=group.size()))
        return recorded.of_layer(self.layer_number - 1)


@torch.no_grad()
def take_router_load(chunks: Sequence[PackedGpt]) -> dict[str, float]:
    """Return the metrics of all tokens since the last call; {} for a dense model. Collective.

    `expert_load`: the largest expert's tokens over the mean. `experts_idle`: the share of experts that got none. Each
    is of the layer where it is largest; the few tokens of padding count too.
    """
    layers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, ExpertLayer)]
    if not layers:
        return {}
    loads_LE = torch.stack([layer.load_E for layer in layers])
    for layer in layers:
        layer.load_E.zero_()
    for group in (groups.alike(), groups.tensor()):
        dist.all_reduce(loads_LE, group=group)
    largest = (loads_LE.amax(1) / loads_LE.mean(1).clamp(min=1)).max()
    idle = (loads_LE == 0).float().mean(1).max()
    worst = torch.stack([largest, idle])
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return dict(zip(("expert_load", "experts_idle"), worst.tolist(), strict=True))
