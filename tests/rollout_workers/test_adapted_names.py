"""An engine is told which of a model's layers adapters may change."""

import torch
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from headway.rollout_workers.engines.weight_loading.engine_adapters import decoder_linears

from .models import make_model


def test_of_a_model_with_experts_attention_is_adapted_and_no_expert_that_all_tokens_share() -> None:
    with torch.device("meta"):
        shared = Qwen2MoeForCausalLM(Qwen2MoeConfig(num_hidden_layers=1))
    attention = ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert decoder_linears(shared) == decoder_linears(make_model("moe", 0)) == attention
    assert decoder_linears(make_model("dense", 0)) == sorted([*attention, "down_proj", "gate_proj", "up_proj"])
