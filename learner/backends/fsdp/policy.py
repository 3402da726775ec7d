"""A packed batch through a transformers model to the logprobs of its tokens, or to the values of their states.

Decoder layers are prepared before they are sharded: fused norms, recomputation, compilation.

T packed tokens, N of this rank, M of these through the output head, H model width, V vocabulary, C candidates in a
token's place.
"""

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from headway.broker.errors import ConfigError
from headway.learner.backends.moe import RecordedExperts
from headway.learner.backends.token_logprobs import (
    candidate_logprobs,
    confident_logprobs,
    likeliest,
    own_first,
    token_logprobs,
)
from headway.learner.batching.batch import PackedBatch
from headway.learner.batching.padding import PaddedShape
from headway.learner.config import ComputeConfig
from headway.learner.models.architectures import SCALED_LOGITS
from headway.learner.models.attention import (
    ATTENTION_NAME,
    PackedLayout,
    RowsAt,
    check_layers_attend,
    register_packed_attention,
)

from .experts import experts_implementation, replay, replayable_routers
from .row import ContextGroup, FsdpRow

if TYPE_CHECKING:
    from transformers import PreTrainedModel


EXPENSIVE = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::_grouped_mm",
        "transformers::grouped_mm_fallback",
        "torch_attn::_varlen_attn",
        "headway::flash_attention",
        "aten::_flash_attention_forward",
        "aten::_efficient_attention_forward",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "_c10d_functional::all_to_all_single",
        "_c10d_functional_autograd::all_to_all_single",
    }
)
"""Operations whose results selective recomputation keeps; it computes all others again."""

Forward = Callable[..., Any]

RECOMPILE_LIMIT = 64
"""Variants of a layer that are compiled: of rows with shared tokens or without, with gradients or without, of a policy,
its reference and its critic, which have one code. Beyond torch's own limit of 8 the layers run uncompiled for good."""


def prepare_layers(layers: Iterable[nn.Module], compute: ComputeConfig) -> None:
    """Recompute and compile as `compute` says. Compilation is outermost, so that the compiler sees recomputation."""
    for layer in layers:
        forward = _recomputed(layer.forward, compute.recompute)
        if compute.compile:
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
            forward = torch.compile(forward, dynamic=True)  # the number of tokens changes with every micro-batch
        layer.forward = forward


def hand_on_layouts(layers: Iterable[nn.Module]) -> None:
    """Give the bounds of packed sequences to attention to which its layer hands no further arguments on: as an
    attribute, set in each forward pass and in each recomputation, in front of which this comes."""
    for layer in layers:
        attention = [part for part in layer.modules() if "ALL_ATTENTION_FUNCTIONS" in _source(part)]
        if not all(_hands_on(part) for part in (layer, *attention)):
            layer.forward = functools.partial(_with_attribute, layer.forward, attention)


def _with_attribute(
    forward: Forward, attention: list[nn.Module], *args: Any, packed_layout: Any = None, **kwargs: Any
) -> Any:
    for part in attention:
        part.packed_layout = packed_layout
    return forward(*args, **kwargs)


def _hands_on(part: nn.Module) -> bool:
    """Return whether the module takes further arguments and hands them on, by its source: `**kwargs` stands there at
    least twice. A wrong answer costs nothing but words: attention without a layout raises."""
    return _source(part).count("**kwargs") > 1


def _source(part: nn.Module) -> str:
    try:
        return inspect.getsource(type(part).forward)
    except (OSError, TypeError):
        return ""


def _recomputed(forward: Forward, recompute: str) -> Forward:
    if recompute == "none":
        return forward
    again = functools.partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
    if recompute == "full":
        return again
    return functools.partial(again, context_fn=_keep_expensive)


def _keep_expensive() -> Any:
    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    schema = getattr(operation, "_schema", None)  # operators of higher order have none
    is_expensive = schema is not None and schema.name in EXPENSIVE
    return CheckpointPolicy.MUST_SAVE if is_expensive else CheckpointPolicy.PREFER_RECOMPUTE


def fuse_norms(model: nn.Module) -> None:
    """Use torch's fused RMSNorm, one kernel for each pass, in the place of norms that compute the same in several.

    In bfloat16 it rounds once, after the multiplication by the weight; most norms of transformers also round before it.
    """
    for module in model.modules():
        kind: Any = type(module)
        if _is_rms_norm(kind):
            module.forward = types.MethodType(_rms_norm, module)


@functools.cache
def _is_rms_norm(kind: Callable[..., nn.Module]) -> bool:
    """Return whether the class computes x / rms(x) * weight, found by trying: Gemma's multiplies by 1 + weight."""
    if not kind.__name__.endswith("RMSNorm"):
        return False
    try:
        norm: Any = kind(8)
        with torch.no_grad():
            norm.weight.copy_(torch.linspace(-1, 2, 8))
            rows = torch.linspace(-3, 1, 24).view(3, 8).square()
            return set(dict(norm.named_parameters())) == {"weight"} and torch.allclose(
                norm(rows), _rms_norm(norm, rows)
            )
    except (AttributeError, TypeError):
        return False


def _rms_norm(norm: Any, rows: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(rows, norm.weight.shape, norm.weight, norm.variance_epsilon)


FEW_EXPERTS = 4
"""The number of experts up to which a CPU runs them faster one by one than by one grouped multiplication."""


class PackedModel(nn.Module):
    """The root module that is sharded; its forward pass computes all that the learner needs of a model."""

    def __init__(
        self,
        model: "PreTrainedModel",
        *,
        on_cpu: bool,
        half_precision: bool,
        context: ContextGroup | None = None,
    ) -> None:
        super().__init__()
        register_packed_attention()
        model.config._attn_implementation = ATTENTION_NAME
        model.config._experts_implementation = experts_implementation(model, few=FEW_EXPERTS if on_cpu else 0)
        self.context = context or ContextGroup()
        self.context.check_heads(model.config)
        self.model = model.eval()  # dropout would make current logprobs differ from behaviour logprobs
        fuse_norms(self.model)
        hand_on_layouts(self.layers)
        self._kind = model.config.model_type
        self._have_asked = False
        """Whether a forward pass has shown that every layer attends by our function."""
        self._routers = replayable_routers(self.layers, model.config.model_type)
        self.tally_2 = torch.zeros(2, dtype=torch.int64)
        """Counts of replayed choices; see `RecordedExperts`."""
        self._varlen = half_precision and not on_cpu
        self.keeps_logits = False
        """Whether a pass may keep its logits for the backward pass."""

    @property
    def state(self) -> nn.Module:
        """The module whose parameter names a checkpoint uses."""
        return self

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers, first to last."""
        kinds = set(self.model._no_split_modules or ())
        found = [part for part in self.model.modules() if type(part).__name__ in kinds]
        return found or [layer for stack in self._stacks() for layer in stack]

    def _stacks(self) -> Iterator[nn.ModuleList]:
        """Yield what holds as many parts as the model has layers, of a model that does not name them."""
        for part in self.model.modules():
            if isinstance(part, nn.ModuleList) and len(part) == self.model.config.num_hidden_layers:
                yield part

    def row(self, batch: PackedBatch) -> FsdpRow:
        """This rank's part of the batch, on the parameters' device."""
        device = next(self.parameters()).device
        return FsdpRow.of(batch, self.context, device, varlen=self._varlen)

    def hidden(self, row: FsdpRow) -> torch.Tensor:
        """[N, H] the last layer's output at this rank's tokens."""
        replay(self._routers, None if row.experts_NLK is None else self._recorded(row.experts_NLK, row.shares_N))
        output = self._attended(row, row.layout) if self._have_asked else self._counted(row)
        hidden_NH: torch.Tensor = output.last_hidden_state[0]
        return hidden_NH

    def _attended(self, row: FsdpRow, layout: PackedLayout) -> Any:
        return self.model.base_model(
            input_ids=row.token_ids_N[None],
            position_ids=row.position_ids_N[None],
            packed_layout=layout,
            use_cache=False,
        )

    def _counted(self, row: FsdpRow) -> Any:
        """Do the same, and count who asks. Code that is compiled for one layer, and used for all, would not say."""
        attending: set[nn.Module] = set()
        with torch.compiler.set_stance("force_eager"):
            output = self._attended(row, dataclasses.replace(row.layout, on_attention=attending.add))
        check_layers_attend(self.layers if hasattr(output, "last_hidden_state") else (), attending, self._kind)
        self._have_asked = True
        return output

    def _recorded(self, experts_NLK: torch.Tensor, shares_N: torch.Tensor | None) -> RecordedExperts:
        if not self._routers:
            raise ConfigError(
                f"algorithm.router_replay=true knows no routers of {self.model.config.model_type}; set it to false."
            )
        self.tally_2 = self.tally_2.to(experts_NLK.device)
        return RecordedExperts(experts_NLK, self.tally_2, shares_N)

    def whole_hidden(self, batch: PackedBatch) -> torch.Tensor:
        """[T, H] the last layer's output at the tokens of all ranks that share the row."""
        row = self.row(dataclasses.replace(batch, tree=None))
        return self.context.gathered(self.hidden(row))[: batch.num_tokens]


class Policy(PackedModel):
    """A model with its own head, over the vocabulary."""

    def __init__(self, model: "PreTrainedModel", **options: Any) -> None:
        unsupported = [name for name in SCALED_LOGITS if getattr(model.config, name, None) not in (None, 1, 1.0)]
        if getattr(model.get_output_embeddings(), "bias", None) is not None:
            unsupported.append("an output head with a bias")
        if unsupported:
            raise ConfigError(f"model: {model.config.model_type} uses {unsupported}, which the fsdp backend ignores.")
        super().__init__(model, **options)

    @property
    def state(self) -> nn.Module:
        named_as_in_files: nn.Module = self.model
        return named_as_in_files

    def forward(self, batch: PackedBatch, temperature: float, top: int = 0) -> torch.Tensor:
        """[T] fp32 logprobs, 0 for the first token of every sequence; [T, 2 + C] or [T, 3] as `PackedBatch` says. With
        `top`: [T, C, 2] the C = `top` likeliest tokens in the place of each token, as `likeliest` gives them."""
        row = self.row(batch)
        if top:
            found_N = likeliest(self.hidden(row), self._head, top, temperature)
        elif batch.wants_confidence or row.next_candidates_NC is None:
            found_N = self.token_values(row, temperature, confident=batch.wants_confidence)
        else:
            tokens_NC = torch.cat([row.next_ids_N[:, None], row.next_candidates_NC], dim=1)
            found_N = own_first(candidate_logprobs(self.hidden(row), self._head, tokens_NC, temperature))
        return row.at_next_token(self.context.gathered(found_N))

    def token_values(self, row: FsdpRow, temperature: float, *, confident: bool) -> torch.Tensor:
        """[N] fp32 logprobs of the tokens that this rank's positions predict, 0 where the row does not want them;
        [N, 3] with the confidence, as `PackedBatch` says."""
        values = functools.partial(confident_logprobs if confident else token_logprobs, keeps=self.keeps_logits)
        hidden_NH, picked_M = self.hidden(row), row.picked_M
        if picked_M is None:
            return values(hidden_NH, self._head, row.next_ids_N, temperature)
        hidden_MH = RowsAt.apply(hidden_NH, picked_M)  # type: ignore[no-untyped-call]
        found_M = values(hidden_MH, self._head, row.next_ids_N[picked_M], temperature)
        return found_M.new_zeros(len(hidden_NH), *found_M.shape[1:]).index_copy(0, picked_M, found_M)

    def padded_row(self, batch: PackedBatch, shape: PaddedShape) -> FsdpRow:
        """The batch in a shape of which rows of other batches may be, too, on the parameters' device."""
        device = next(self.parameters()).device
        return FsdpRow.of(batch, self.context, device, varlen=True, shape=shape)

    @property
    def _head(self) -> torch.Tensor:
        weight_VH: torch.Tensor = self.model.get_output_embeddings().weight
        return weight_VH


class ValueModel(PackedModel):
    """A model whose head is replaced by a linear one of one output, in fp32 and zero at first."""

    has_bias = True

    def __init__(self, model: "PreTrainedModel", **options: Any) -> None:
        super().__init__(model.base_model, **options)
        with torch.random.fork_rng(devices=[]):  # the process's own generator goes on as it would without a critic
            self.head = nn.Linear(model.get_output_embeddings().weight.shape[1], 1, bias=self.has_bias)
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """[T] fp32 values of the states in which the tokens are chosen, 0 for the first token of every sequence.

        Its routers choose for themselves, since they drift apart from the policy's.
        """
        row = self.row(dataclasses.replace(batch, experts_TLK=None))
        values_N = self.head(self.hidden(row).float())[:, 0]
        return row.at_next_token(self.context.gathered(values_N))


class ScoreModel(ValueModel):
    """A value model as transformers' sequence classifiers are: without a bias."""

    has_bias = False
