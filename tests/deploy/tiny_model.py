"""The files of a model of a few thousand random weights, outside of any run."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headway.learner.models.pretrained import load_model, load_tokenizer
from tests.learner.tiny import model_config

SMALL = ("engine.max_model_len=64", "sampling.max_new_tokens=8")


def make_model(directory: Path, chat_template: str | None = None) -> Path:
    config = model_config("qwen3")
    load_model(config).save_pretrained(directory)
    tokenizer = load_tokenizer(config)
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(directory)
    return directory


def greedy(model: Path, prompt: str, new_tokens: int = 8) -> torch.Tensor:
    """Return the tokens with which transformers continues the prompt."""
    asked = torch.tensor([AutoTokenizer.from_pretrained(model)(prompt).input_ids])
    made = AutoModelForCausalLM.from_pretrained(model).generate(
        asked, attention_mask=torch.ones_like(asked), do_sample=False, max_new_tokens=new_tokens
    )
    response: torch.Tensor = made[0, asked.shape[1] :]
    return response
