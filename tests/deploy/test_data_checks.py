"""The checks of data that take seconds are made once."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from headway.broker.errors import ConfigError
from headway.broker.installation import version_of
from headway.deploy.recipe import preflight
from headway.deploy.recipe.preflight import check_data, check_models
from headway.deploy.recipe.resolve import load_recipe
from headway.deploy.roles.recipe_backends import recipe_backend
from headway.learner.models.architectures import check_heads

RECIPE = "smollm2-reasoning-gym.yaml"
IMPORTS = """
import sys
from headway.deploy.recipe.preflight import check_data
from headway.deploy.recipe.resolve import load_recipe
from headway.deploy.roles.recipe_backends import recipe_backend
from headway.learner.models.architectures import check_heads
check_data(load_recipe(sys.argv[1], sys.argv[2:]))
print("reasoning_gym" in sys.modules)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "headway" / "checked"


@pytest.mark.slow
def test_tasks_that_have_passed_are_not_imported_again_before_a_run_begins() -> None:
    def imports(*overrides: str) -> str:
        command = [sys.executable, "-c", IMPORTS, RECIPE, *overrides]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert imports() == "True"
    assert imports() == "False"
    assert imports("prompts.options.chain_sum.max_terms=4") == "True", "these options have not been checked"


def test_a_refusal_is_told_each_time(cache: Path) -> None:
    recipe = load_recipe(RECIPE, ["prompts.options.chain_sum.max_term=5"])
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"prompts\.options: reasoning_gym task 'chain_sum' refuses them"):
            check_data(recipe)
    assert not cache.exists()


def test_all_that_the_answer_depends_on_is_checked_anew(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    check_data(load_recipe(RECIPE, []))
    checked = len(list(cache.iterdir()))
    check_data(load_recipe(RECIPE, ["run.seed=1"]))
    assert len(list(cache.iterdir())) == 2 * checked
    for number, changed in enumerate(("reasoning-gym", "headway"), start=3):
        monkeypatch.setattr(
            "headway.deploy.recipe.preflight.version_of",
            lambda name, new=changed: "0" if name == new else version_of(name),
        )
        check_data(load_recipe(RECIPE, []))
        assert len(list(cache.iterdir())) == number * checked


def test_a_package_of_no_known_version_is_checked_each_time(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr("headway.deploy.recipe.preflight.version_of", lambda _: None)
    check_data(load_recipe(RECIPE, []))
    assert not cache.exists()


def test_a_cache_that_cannot_be_used_costs_time_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / ("too-long" * 40)):
        monkeypatch.setenv("XDG_CACHE_HOME", str(place))
        check_data(load_recipe(RECIPE, []))


def config_file(directory: Path, **config: object) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    return directory


SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 2, "intermediate_size": 48}


@pytest.mark.parametrize(
    ("config", "overrides", "words"),
    [
        ({"model_type": "bloom"}, [], r"cannot train bloom"),
        ({"model_type": "mamba"}, ["engine.kind=vllm"], r"cannot train mamba"),
        ({"model_type": "gemma2", "final_logit_softcapping": 30.0}, ["engine.kind=vllm"], r"cannot train gemma2"),
        ({"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]}, [], r"train qwen3_next"),
        ({"model_type": "gemma3_text", "layer_types": ["sliding_attention"]}, [], r"engine does not support gemma3_te"),
        ({"model_type": "mixtral"}, ["learner.backend=megatron"], r"megatron cannot train mixtral"),
        ({"model_type": "qwen3", **SIX_HEADS}, ["learner.backend=megatron"], r"context=2 .* 3 key/value heads"),
        ({"model_type": "qwen3", **SIX_HEADS}, [], r"context=2 .* 3 key/value heads"),
        ({"model_type": "qwen3", **SIX_HEADS}, ["learner.layout.context=4"], r"context=4 .* 6 attention heads"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_by_its_configuration(
    tmp_path: Path, config: dict[str, object], overrides: list[str], words: str
) -> None:
    model = config_file(tmp_path / "model", **config)
    chosen = [f"model.path={model}", "model.random=null", "learner.processes=4", "learner.layout.context=2", *overrides]
    with pytest.raises(ConfigError, match=words):
        check_models(load_recipe("arithmetic.yaml", chosen))


@pytest.mark.parametrize(
    ("sizes", "key"),
    [
        ({"vocab_size": 10**30}, "vocab_size"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"hidden_size": 1 << 20, "num_hidden_layers": 1000}, "num_hidden_layers"),
    ],
)
def test_sizes_of_no_model_are_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], key: str
) -> None:
    monkeypatch.setattr(preflight, "check_models", pytest.fail)
    model = config_file(tmp_path / "model", model_type="qwen3", **sizes)
    (model / "tokenizer_config.json").write_text("{}")
    save_file({"a": np.zeros(1, np.float32)}, model / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"model\.path: .*config\.json.*{key}"):
        check_data(load_recipe("arithmetic.yaml", [f"model.path={model}", "model.random=null"]), is_new=True)
    given = [f"model.random.config.{name}={size}" for name, size in sizes.items()]
    with pytest.raises(ConfigError, match=rf"model\.random\.config.*{key}"):
        check_data(load_recipe("arithmetic.yaml", given), is_new=True)


WIDE = {"model_type": "llama", "hidden_size": 1024, "num_attention_heads": 2, "num_key_value_heads": 2}
LATENT = {"model_type": "deepseek_v3", "head_dim": 64, "qk_nope_head_dim": 256, "qk_rope_head_dim": 64}


@pytest.mark.parametrize(
    ("config", "width"),
    [
        (WIDE, 512),
        ({**WIDE, "head_dim": 320}, 320),
        (LATENT, 320),
        ({**LATENT, "qk_nope_head_dim": 128, "v_head_dim": 264}, 264),
        ({"model_type": "gemma4", "text_config": {"head_dim": 256, "global_head_dim": 512}}, 512),
        ({**WIDE, "head_dim": 256}, 0),
        ({**WIDE, "num_attention_heads": 4}, 0),
        ({**LATENT, "qk_nope_head_dim": 128, "v_head_dim": 128}, 0),
        ({"model_type": "llama"}, 0),
    ],
)
def test_heads_that_the_kernel_of_gpus_does_not_take_are_refused_by_their_width(
    config: dict[str, object], width: int
) -> None:
    for backend in ("fsdp", "megatron"):
        if width:
            with pytest.raises(ConfigError, match=rf"model.path: .* {width} wide, .* at most 256\. Set model\.dtype"):
                check_heads(config, backend, "cuda", "bfloat16")
        else:
            check_heads(config, backend, "cuda", "bfloat16")
        check_heads(config, backend, "cuda", "float32")
        check_heads(config, backend, "cpu", "bfloat16")
    check_heads(config, "my_code:Backend", "cuda", "bfloat16")


def test_wide_heads_are_refused_before_a_run_starts_and_where_the_model_is_loaded(tmp_path: Path) -> None:
    model = config_file(tmp_path / "model", **WIDE)
    wide = ["learner.device=cuda", "model.dtype=bfloat16", "weights.transport=gloo", "weights.staging=host"]
    recipe = load_recipe("arithmetic.yaml", [f"model.path={model}", "model.random=null", *wide])
    with pytest.raises(ConfigError, match=r"model: an attention head of this llama is 512 wide"):
        check_models(recipe)
    with pytest.raises(ConfigError, match=r"model: an attention head of this llama is 512 wide"):
        recipe_backend(recipe)


def test_a_random_model_is_refused_by_name_alike() -> None:
    with pytest.raises(ConfigError, match="cannot train falcon"):
        check_models(load_recipe("arithmetic.yaml", ["model.random.architecture=falcon"]))
    check_models(load_recipe("arithmetic.yaml", []))
