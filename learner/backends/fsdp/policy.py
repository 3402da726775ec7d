"""A packed batch through a transformers model to the logprobs of its tokens, or to the values of their states.

T packed tokens, H model width, V vocabulary.
"""

import functools
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from broker.errors import ConfigError
from learner.attention import ATTENTION_NAME, PackedLayout, register_packed_attention
from learner.batch import PackedBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOGITS_PER_CHUNK = 1 << 26
"""At most so many fp32 logits exist at once (256 MiB); more come in chunks, again in the backward pass."""

FEW_EXPERTS = 4
"""On a CPU, up to so many experts one after the other are faster than one grouped multiplication."""

SCALED_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale")
"""Options of models whose logits are more than the output embedding's product."""


class PackedModel(nn.Module):
    """The root that is sharded: its forward pass is the whole of what the learner asks of a model."""

    def __init__(self, model: "PreTrainedModel", *, on_cpu: bool, half_precision: bool) -> None:
        super().__init__()
        register_packed_attention()
        model.config._attn_implementation = ATTENTION_NAME
        model.config._experts_implementation = _experts(model, on_cpu)
        self.model = model.eval()  # dropout would make current logprobs differ from behaviour logprobs
        self._varlen = half_precision and not on_cpu

    @property
    def state(self) -> nn.Module:
        """What names the parameters in a checkpoint."""
        return self

    def hidden(self, batch: PackedBatch) -> torch.Tensor:
        """[T, H] the last layer's output at every token."""
        layout = PackedLayout.of(batch.cu_seqlens, varlen=self._varlen)
        hidden_TH: torch.Tensor = self.model.base_model(
            input_ids=batch.token_ids_T[None],
            position_ids=batch.position_ids_T[None],
            packed_layout=layout,
            use_cache=False,
        ).last_hidden_state[0]
        return hidden_TH


class Policy(PackedModel):
    """With the model's own head, over the vocabulary."""

    def __init__(self, model: "PreTrainedModel", *, on_cpu: bool, half_precision: bool) -> None:
        unsupported = [name for name in SCALED_LOGITS if getattr(model.config, name, None) not in (None, 1, 1.0)]
        if unsupported:
            raise ConfigError(f"model: {model.config.model_type} uses {unsupported}, which the fsdp backend ignores.")
        super().__init__(model, on_cpu=on_cpu, half_precision=half_precision)

    @property
    def state(self) -> nn.Module:
        named_as_in_files: nn.Module = self.model
        return named_as_in_files

    def forward(self, batch: PackedBatch, temperature: float) -> torch.Tensor:
        """[T] fp32 logprobs, 0 for the first token of every sequence."""
        next_logprobs = head_logprobs(
            self.hidden(batch)[:-1], self.model.get_output_embeddings(), batch.token_ids_T[1:], temperature
        )
        return _at_next_token(next_logprobs, batch)


class ValueModel(PackedModel):
    """With a linear head of one output, in fp32 and zero at first, in place of the model's own."""

    def __init__(self, model: "PreTrainedModel", *, on_cpu: bool, half_precision: bool) -> None:
        super().__init__(model.base_model, on_cpu=on_cpu, half_precision=half_precision)
        with torch.random.fork_rng(devices=[]):  # the process's own generator goes on as it would without a critic
            self.head = nn.Linear(model.get_output_embeddings().weight.shape[1], 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """[T] fp32 values of the states in which the tokens are chosen, 0 for the first token of every sequence."""
        next_values = self.head(self.hidden(batch)[:-1].float())[:, 0]
        return _at_next_token(next_values, batch)


def _at_next_token(next_T: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """[T] what all tokens but the row's last say of the one that follows; 0 where a sequence begins."""
    return F.pad(next_T, (1, 0)).where(batch.position_ids_T > 0, 0.0)


def head_logprobs(
    hidden_TH: torch.Tensor,
    head: nn.Module,
    targets_T: torch.Tensor,
    temperature: float,
    logits_per_chunk: int = LOGITS_PER_CHUNK,
) -> torch.Tensor:
    """[T] log softmax(head(hidden) / temperature)[target] in fp32, without ever holding all [T, V] logits."""
    rows = max(1, logits_per_chunk // _vocabulary(head))
    if len(hidden_TH) <= rows:
        return _chunk_logprobs(hidden_TH, head, targets_T, temperature)
    chunks = zip(torch.split(hidden_TH, rows), torch.split(targets_T, rows), strict=True)
    recomputed = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([recomputed(_chunk_logprobs, h, head, t, temperature) for h, t in chunks])


def _vocabulary(head: nn.Module) -> int:
    assert isinstance(head.weight, torch.Tensor)
    return head.weight.shape[0]


def _chunk_logprobs(
    hidden_TH: torch.Tensor, head: nn.Module, targets_T: torch.Tensor, temperature: float
) -> torch.Tensor:
    logits_TV = head(hidden_TH).float() / temperature
    return -F.cross_entropy(logits_TV, targets_T, reduction="none")


def _experts(model: "PreTrainedModel", on_cpu: bool) -> str:
    count = getattr(model.config, "num_experts", None) or getattr(model.config, "num_local_experts", None) or 0
    return "eager" if on_cpu and count <= FEW_EXPERTS else "grouped_mm"


def placeholder(device: torch.device) -> PackedBatch:
    """What an empty micro-batch computes, so that its rank joins every collective: two tokens, no loss."""
    zeros = torch.zeros(2, device=device)
    return PackedBatch(
        token_ids_T=zeros.long(),
        position_ids_T=torch.arange(2, device=device),
        cu_seqlens=torch.tensor([0, 2], dtype=torch.int32, device=device),
        loss_mask_T=zeros,
        behavior_logprobs_T=zeros,
        advantages_T=zeros,
        lags_T=zeros.long(),
    )
