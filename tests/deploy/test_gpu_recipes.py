"""Each recipe for GPUs fits the GPUs that it names, with each of the models that it is for and one role on each GPU."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from headway.broker.errors import ConfigError
from headway.deploy.cli.memory_report import report
from headway.deploy.recipe.placement import check_placement, placed
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.recipe.resolve import load_recipe
from headway.learner.config import ModelConfig, RandomModelConfig
from headway.learner.models.pretrained import load_tokenizer
from headway.learner.objective.composition import check_algorithm

from .test_cli import headway

ROOT = Path(__file__).parents[2]
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
ONE_MACHINE = ("qwen3-8b", "llama-3.1-8b")
BASES = {("qwen3-30b-a3b", "sft-rm-ppo"): "qwen3-30b-a3b-fsdp"}
"""The base of a model that cannot use a recipe's usual base."""
SCORED = ("sft-rm-ppo", "distill")
SECOND_MACHINE = {
    True: ["headway workers --count 7 'workers.devices=[0,1,2,3,4,5,6]'", "headway scorers 'scorers.devices=[7]'"],
    False: ["headway workers --count 8 'workers.devices=[0,1,2,3,4,5,6,7]'"],
}
"""The commands of docs/guides/gpus.md for the second machine, with a scorer and without one."""


def path_of(model: str, directory: Path) -> str:
    """Write the model's configuration with its publisher's sizes, and a small tokenizer."""
    AutoConfig.for_model(**MODELS[model]).save_pretrained(directory)
    load_tokenizer(ModelConfig(random=RandomModelConfig(architecture="qwen3", alphabet="ab"))).save_pretrained(
        directory
    )
    return str(directory)


def recipe_of(model: str, way: str, *overrides: str) -> Recipe:
    chosen = [f"base=gpu/{BASES.get((model, way), model)}.yaml"] if way else []
    return load_recipe(f"gpu/{way or model}.yaml", [*chosen, *overrides])


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", MODELS)
def test_learner_and_scorers_fit_the_gpus_that_the_recipe_names(model: str, way: str, tmp_path: Path) -> None:
    teacher = [f"teacher.path={path_of('qwen3-32b', tmp_path / 'teacher')}"] if way == "distill" else []
    recipe = recipe_of(model, way, f"model.path={path_of(model, tmp_path)}", *teacher)
    check_algorithm(recipe.algorithm)
    found = report(recipe, GPU_GB[model])
    assert found.planned.shape.num_parameters == pytest.approx(PARAMETERS[model], rel=0.01)
    assert found.fits
    assert [scorer.total is not None for scorer in found.scorers] == [True] * (way in SCORED)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", MODELS)
def test_no_gpu_has_two_roles(model: str, way: str) -> None:
    recipe = recipe_of(model, way)
    if not recipe.has_learner:
        return
    if model in ONE_MACHINE:
        check_placement(recipe, "")
        assert [one.gpu for one in placed(recipe, "")] == [*"01234567"]
    else:
        assert recipe.learner.processes == 8
        with pytest.raises(ConfigError, match="start the learner with `headway learner`"):
            check_placement(recipe, "")


@pytest.mark.parametrize("is_scored", [True, False])
def test_the_second_machines_commands_use_each_gpu_once(is_scored: bool, tmp_path: Path) -> None:
    taken = []
    for command in SECOND_MACHINE[is_scored]:
        options = ("--broker", "redis://127.0.0.1:1", "--run", "x", "--dry-run", "--json")
        answer = headway(*shlex.split(command)[1:], *options, cwd=tmp_path)
        assert answer.returncode == 0, answer.stderr
        taken += [one["resources"]["devices"] for one in json.loads(answer.stdout)["commands"]]
    assert taken == [*"01234567"]
