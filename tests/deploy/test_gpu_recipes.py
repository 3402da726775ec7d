"""The recipes for GPUs fit the GPUs that they name, with each of the models that they are for."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from deploy.cli.memory_pages import report
from deploy.recipe.files import SHIPPED
from deploy.recipe.loading import load_recipe
from learner.config import ModelConfig, RandomModelConfig
from learner.models.model import load_tokenizer
from learner.objective.composition import check_algorithm

QWEN3: dict[str, Any] = {"vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 40960}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-8b": QWEN3
    | {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "qwen3-32b": QWEN3
    | {
        "model_type": "qwen3",
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": QWEN3
    | {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "llama-3.1-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
}
PARAMETERS = {"qwen3-8b": 8.19e9, "qwen3-32b": 32.8e9, "qwen3-30b-a3b": 30.5e9, "llama-3.1-8b": 8.03e9}
GPU_GB = {"qwen3-8b": 80, "qwen3-32b": 141, "qwen3-30b-a3b": 141, "llama-3.1-8b": 80}
WAYS = ("", "dpo", "online-dpo", "sft-rm-ppo", "distill")
BESIDES = {("qwen3-30b-a3b", "sft-rm-ppo"): ["learner.processes=16", "learner.compute.offload_optimizer=false"]}
"""What a recipe says that another model takes."""


def path_of(model: str, directory: Path) -> str:
    """Write the model's configuration, with the sizes that its publisher's says, and a small tokenizer."""
    AutoConfig.for_model(**MODELS[model]).save_pretrained(directory)
    load_tokenizer(ModelConfig(random=RandomModelConfig(architecture="qwen3", alphabet="ab"))).save_pretrained(
        directory
    )
    return str(directory)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", MODELS)
def test_the_learner_fits_the_gpus_that_the_recipe_names(model: str, way: str, tmp_path: Path) -> None:
    chosen = [f"base=gpu/{model}.yaml", *BESIDES.get((model, way), [])] if way else []
    recipe = load_recipe(f"gpu/{way or model}.yaml", [*chosen, f"model.path={path_of(model, tmp_path)}"])
    check_algorithm(recipe.algorithm)
    found = report(recipe, GPU_GB[model])
    assert found.planned.shape.num_parameters == pytest.approx(PARAMETERS[model], rel=0.01)
    assert found.fits


@pytest.mark.parametrize("model", MODELS)
def test_a_recipe_says_which_gpus_it_is_for(model: str) -> None:
    assert f"of {GPU_GB[model]} GB" in (SHIPPED / f"gpu/{model}.yaml").read_text()


@pytest.mark.parametrize(("model", "way"), BESIDES)
def test_a_recipe_says_what_another_model_takes(model: str, way: str) -> None:
    assert f"base=gpu/{model}.yaml {' '.join(BESIDES[model, way])}" in (SHIPPED / f"gpu/{way}.yaml").read_text()
