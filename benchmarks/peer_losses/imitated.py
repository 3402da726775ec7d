"""Headway's side of supervised fine-tuning: from records to the gradient of a small model of float64."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import torch

from headway.algorithms.metrics import summarize
from headway.learner.backends.fsdp.policy import Policy
from headway.learner.batching.clusters import Unit, pack_units
from headway.learner.batching.packing import labelled
from headway.learner.config import ModelConfig, RandomModelConfig
from headway.learner.data.prompts.rendering import Renderer
from headway.learner.data.records import Conversation, Message
from headway.learner.data.records.conversation_renderer import ConversationRenderer
from headway.learner.data.records.record_types import Trained
from headway.learner.models.pretrained import load_model, load_tokenizer
from headway.learner.stages.sft import SftTask

from .ours import Side
from .sample import Outcome, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
RANDOM = RandomModelConfig(
    architecture="qwen3",
    config={**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3},
    alphabet="0123456789+=ua",
)
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{% if m.role == 'assistant' %}{% generation %}{{ m.content + eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)
"""A template that marks the assistant's text, which TRL needs."""
TURNS = (("1+1=", "2"), ("12+30=", "42", "42+8=", "50", "5=", "5"), ("7+8=", "15", "9=", "9+0"), ("3=", "3"))
"""The contents of each conversation's messages."""
BUDGET = 24
"""Tokens of a packed row, so that the batch has several."""


def imitated(trained: Trained, *, metrics: Sequence[str] = ()) -> Side:
    """Return the loss of the stage `sft`, summed over packed rows, or these metrics."""

    def side(_: Sample) -> Outcome:
        units, network = _units(trained), model()
        packed = pack_units(units, replica=0, replicas=1, micro_batch_tokens=BUDGET)
        rows = [replace(row, batch=replace(row.batch, wants_confidence=True)) for row in packed]
        loss = SftTask(units, ()).loss(rows, range(len(units)), held_out=False)
        policy = Policy(network, on_cpu=True, half_precision=False)
        found = [loss(number, policy(row.batch, 1.0)) for number, row in enumerate(rows)]
        if not metrics:
            return by_parameters(torch.stack([value for value, _ in found]).sum(), network)
        numbers = summarize({name: sum(one[name] for _, one in found) for name in found[0][1]})
        return Outcome(torch.tensor([numbers[name] for name in metrics]))

    return side


def by_parameters(loss: torch.Tensor, network: "PreTrainedModel") -> Outcome:
    """Return a loss, and its gradient by all parameters."""
    gradients = torch.autograd.grad(loss, list(network.parameters()))
    return Outcome(loss.detach(), torch.cat([gradient.flatten() for gradient in gradients]))


def conversations() -> list[tuple[list[Message], list[Message]]]:
    """Return prompts, each with the last answer as its completion."""
    roles = ("user", "assistant")
    told = [[{"role": roles[n % 2], "content": text} for n, text in enumerate(turns)] for turns in TURNS]
    return [(messages[:-1], messages[-1:]) for messages in told]


@cache
def tokenizer() -> "PreTrainedTokenizerBase":
    found = load_tokenizer(ModelConfig(random=RANDOM))
    found.chat_template = TEMPLATE
    return found


def model() -> "PreTrainedModel":
    """Return a new model, with the same weights each time."""
    return load_model(ModelConfig(random=RANDOM, dtype="float32"), 1).double()


def _units(trained: Trained) -> list[Unit]:
    renderer = ConversationRenderer(tokenizer(), Renderer(tokenizer()))
    units: list[Unit] = []
    for prompt, completion in conversations():
        rendered = renderer.render(Conversation(prompt=prompt, completion=completion, trained=trained))
        assert rendered is not None
        units.append((labelled(rendered.token_ids, rendered.loss_mask),))
    return units
