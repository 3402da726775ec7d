from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import headway.learner.backends.fsdp.backend
from headway.broker.errors import ConfigError
from headway.learner.backends import open_backend
from headway.learner.backends.fsdp.backend import FsdpBackend
from headway.learner.backends.megatron.backend import open_source
from headway.learner.config import ModelConfig
from headway.learner.models.pretrained import load_model, load_tokenizer
from tests.learner.tiny import OPTIMIZER, model_config

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def written(
    directory: Path, architecture: str, *, tied: bool = True, dtype: torch.dtype = torch.float32, size: str = "1GB"
) -> ModelConfig:
    """Write a random model's files, without constant norms and biases, which would hide a mistake."""
    config = model_config(architecture, tied=tied, **ARCHITECTURES[architecture])
    model = load_model(config, 5)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    model.to(dtype).save_pretrained(directory, max_shard_size=size)
    load_tokenizer(config).save_pretrained(directory)
    return ModelConfig(path=str(directory))


def opened(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> FsdpBackend:
    """Open the model without the path that needs memory for all of it."""
    monkeypatch.setattr(headway.learner.backends.fsdp.backend, "load_model", None)
    backend = open_backend("fsdp", config, OPTIMIZER)
    assert isinstance(backend, FsdpBackend)
    return backend


def assert_same(backend: FsdpBackend, model: PreTrainedModel) -> None:
    """Assert that parameters and buffers are equal, also those that no file has."""
    expected = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    streamed = backend._policy.model
    got = dict(streamed.named_parameters(remove_duplicate=False)) | dict(streamed.named_buffers())
    assert got.keys() == expected.keys()
    assert any("inv_freq" in name for name in got)
    for name, tensor in expected.items():
        full = got[name].full_tensor() if hasattr(got[name], "full_tensor") else got[name]
        assert full.dtype == tensor.dtype
        assert torch.equal(full, tensor), name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [True, False])
def test_streamed_weights_are_those_that_transformers_loads(
    architecture: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = written(tmp_path / "in", architecture, tied=tied)
    expected = load_model(config)
    backend = opened(config, monkeypatch)
    assert_same(backend, expected)
    backend.save(tmp_path / "out")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("in", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_several_files_in_bfloat16_become_fp32_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = written(tmp_path, "qwen3_moe", dtype=torch.bfloat16, size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    expected = load_model(config)
    assert_same(opened(config, monkeypatch), expected)


def test_a_critic_reads_only_the_body(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = written(tmp_path, "qwen3", tied=False)
    body = load_model(config).base_model.state_dict()
    monkeypatch.setattr(headway.learner.backends.fsdp.backend, "load_model", None)
    critic = open_backend("fsdp", config, OPTIMIZER, head="value")
    got = critic._module.model.state_dict()  # type: ignore[attr-defined]
    assert got.keys() == body.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in body.items())
    assert not critic._module.head.weight.any()  # type: ignore[attr-defined]


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    config = written(tmp_path, "qwen3")
    tensors = load_file(tmp_path / "model.safetensors")
    norm = tensors.pop("model.norm.weight")
    for broken, message in ((tensors, "lacks 1 weights"), (tensors | {"model.norm.weight": norm[:3]}, r"shape \[3\]")):
        save_file(broken, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ConfigError, match=message):
            open_backend("fsdp", config, OPTIMIZER)


@pytest.mark.parametrize(
    "opener", [lambda config: open_backend("fsdp", config, OPTIMIZER), lambda c: open_source(c, 0)]
)
def test_a_head_beside_the_embedding_that_it_is_tied_to_must_equal_it(opener: Any, tmp_path: Path) -> None:
    config = written(tmp_path, "qwen3", tied=True)
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    opener(config)
    save_file(tensors | {"lm_head.weight": head + 1}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lm_head\.weight to model\.embed_tokens\.weight"):
        opener(config)


def test_tensors_without_a_place_in_the_model_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = written(tmp_path, "qwen3")
    tensors = load_file(tmp_path / "model.safetensors")
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    save_file(tensors | more, tmp_path / "model.safetensors", metadata={"format": "pt"})
    open_backend("fsdp", config, OPTIMIZER)
    open_backend("fsdp", config, OPTIMIZER, head="value")
    assert not caplog.records
    more |= {"model.layers.7.input_layernorm.weight": torch.ones(2), "visual.weight": torch.ones(2)}
    save_file(tensors | more, tmp_path / "model.safetensors", metadata={"format": "pt"})
    open_backend("fsdp", config, OPTIMIZER)
    (told,) = caplog.messages
    assert "2 tensors" in told
    assert "model.layers.7.input_layernorm.weight" in told


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head", ["policy", "value"])
def test_weights_that_are_no_numbers_are_told_by_file_and_tensor(
    number: float, dtype: torch.dtype, head: Any, tmp_path: Path
) -> None:
    config = written(tmp_path, "qwen3", dtype=dtype)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 2] = number
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError) as caught:
        open_backend("fsdp", config, OPTIMIZER, head=head)
    assert str(tmp_path / "model.safetensors") in str(caught.value)
    assert "model.layers.1.mlp.up_proj.weight" in str(caught.value)
