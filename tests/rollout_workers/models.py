"""Small random models, made where the test runs, without a tokenizer or a download."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCABULARY = 64
STOP = 1

_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "eos_token_id": STOP,
    "bos_token_id": None,
    "initializer_range": 0.15,
}

Architecture = Literal["dense", "moe"]


def make_model(
    architecture: Architecture, seed: int, *, tied: bool = True, expert_width: int = 32, head_dim: int = 32
) -> PreTrainedModel:
    """Make a random Qwen3 (MoE) in fp32 whose greedy answers depend on the seed."""
    torch.manual_seed(seed)
    shape = {**_SHAPE, "head_dim": head_dim}
    if architecture == "dense":
        return Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=tied)).eval()
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": expert_width,
        "norm_topk_prob": True,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts, tie_word_embeddings=tied)).eval()


def save_config(model: PreTrainedModel, directory: Path) -> Path:
    """Write a model directory as workers get it: config.json, no weights."""
    directory.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(directory)
    return directory


def named_tensors(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    """Return a learner's tensors as they arrive: views of one flat bucket of bytes."""
    sent = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    bucket = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in sent])
    pieces = bucket.split([tensor.nbytes for _, tensor in sent])
    return [
        (name, piece.view(tensor.dtype).view(tensor.shape)) for (name, tensor), piece in zip(sent, pieces, strict=True)
    ]


@torch.no_grad()
def forward_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """Return [R] logprobs of the response by a plain transformers forward, with which every engine is compared."""
    logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(response)[:, None])[:, 0]
