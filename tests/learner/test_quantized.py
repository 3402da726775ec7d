# mypy: disable-error-code="attr-defined"
"""An adapter beside a base in few bits computes what it computes beside the same base made dense.

`make test-peft` runs nf4 too, with bitsandbytes, in an environment of its own.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader
from torch.utils._python_dispatch import TorchDispatchMode

from headway.broker.errors import ConfigError
from headway.broker.installation import is_installed
from headway.learner.backends import open_backend, quantization
from headway.learner.backends.adapter import adapted_model, open_weights
from headway.learner.backends.fsdp.optimizer import STATE_FOLDER
from headway.learner.backends.quantization import BLOCK, is_quantized, quantize, quantized_weights
from headway.learner.batching.packing import pack
from headway.learner.config import ComputeConfig, LearnerConfig, ModelConfig
from headway.learner.models.pretrained import load_config
from headway.learner.models.shape import adapter_parameters, shape_of
from headway.learner.planning.memory import PlannedModel, plan_memory
from tests.learner.adapted import saved_base, with_adapter
from tests.learner.test_fsdp import as_dict
from tests.learner.tiny import OPTIMIZER, model_config, ratio_loss, sequences

NEEDED = pytest.mark.skipif(not is_installed("bitsandbytes"), reason="bitsandbytes is not installed: make test-peft")
KINDS = [pytest.param("nf4", marks=NEEDED), "int8"]
MODELS = {"dense": model_config("qwen2"), "experts": model_config("qwen3_moe", num_experts=9)}
LENGTHS = [7, 12, 5, 20]


@NEEDED
@pytest.mark.parametrize("shape", [(96, 64), (48, 32), (3, 24, 32)])
def test_nf4_takes_the_nearest_of_its_sixteen_codes(shape: tuple[int, ...]) -> None:
    """Rows of 32 share blocks of 64."""
    from bitsandbytes.functional import get_4bit_type

    codes = get_4bit_type("nf4", device="cpu").float()
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    blocks = weight.view(-1, BLOCK)
    largest = blocks.abs().amax(1, keepdim=True)
    nearest = (blocks[..., None] / largest[..., None] - codes).abs().argmin(-1)
    expected = (codes[nearest] * largest).view(shape)
    torch.testing.assert_close(quantize(weight, "nf4").dense(torch.float32), expected, rtol=0, atol=1e-6)


def test_int8_is_off_by_half_a_step_at_most() -> None:
    weight = torch.randn(4, 6, 32, generator=torch.Generator().manual_seed(0))
    weight[0, 0] = 0.0
    step = weight.abs().amax(-1, keepdim=True) / 127
    found = quantize(weight, "int8").dense(torch.float32)
    assert bool(((found - weight).abs() <= 0.5001 * step).all())
    assert not torch.equal(found, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_is_made_dense_in_the_asked_format_alone(dtype: torch.dtype) -> None:
    found = quantize(torch.randn(9, 40, 32, generator=torch.Generator().manual_seed(0)), "int8")
    with Returned() as returned:
        dense = found.dense(dtype)
    assert returned.dtypes == {dtype}, "fp32 would be two thirds of the bytes at the peak"
    assert torch.equal(dense, (found.codes * found.scales).to(dtype))


class Returned(TorchDispatchMode):
    """Notes the number formats of what operations returned while this was entered."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        self.dtypes.add(result.dtype)
        return result


def made_dense(base: ModelConfig, backend: Any, directory: Path) -> ModelConfig:
    """Write the base of the backend, as it computes with it, as a model in fp32."""
    shutil.copytree(base.path, directory)
    files = load_file(directory / "model.safetensors")
    tensors = {name: tensor.float().contiguous() for name, tensor in backend.base_tensors()}
    assert tensors.keys() == files.keys()
    changed = {name for name in files if not torch.equal(files[name], tensors[name])}
    assert changed, "the base is quantized"
    if backend._dtype is torch.float32:
        assert changed == {name for name in files if name.endswith("_proj.weight")}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return replace(base, path=str(directory))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("dtype", "recompute"), [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "selective"), ("float32", "full")]
)
def test_a_quantized_base_computes_what_it_computes_made_dense(
    kind: str, name: str, dtype: Any, recompute: Any, tmp_path: Path
) -> None:
    compute = ComputeConfig(recompute=recompute)
    base = saved_base(replace(MODELS[name], dtype=dtype), tmp_path / "base")
    some = {"targets": ("q_proj", "down_proj")} if recompute == "selective" else {}
    backend = open_backend("fsdp", with_adapter(base, quantize_base=kind, **some), OPTIMIZER, seed=3, compute=compute)
    dense = made_dense(base, backend, tmp_path / "dense")
    other = open_backend("fsdp", with_adapter(dense, **some), OPTIMIZER, seed=3, compute=compute)
    batches = pack(sequences(LENGTHS), 0, 1, 30)
    for _ in range(2):
        steps = [one.step(batches, ratio_loss(batches, 9.0), 0.9, 1e-2)[:2] for one in (backend, other)]
        assert steps[0] == pytest.approx(steps[1], rel=1e-6 if dtype == "float32" else 1e-3)
    for mine, theirs in zip(backend.logprobs(batches, 1.0), other.logprobs(batches, 1.0), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5 if dtype == "float32" else 0.02)
    merged = as_dict(other)
    for key, tensor in as_dict(backend).items():
        torch.testing.assert_close(tensor, merged[key], rtol=0, atol=1e-5 if dtype == "float32" else 0.01)


@pytest.mark.parametrize("name", MODELS)
def test_no_dense_weight_is_kept_for_the_backward_pass(name: str, tmp_path: Path) -> None:
    base = saved_base(MODELS[name], tmp_path / "base")
    kept: dict[str, set[tuple[int, ...]]] = {}
    batches = pack(sequences(LENGTHS), 0, 1, 1000)
    for kind in ("none", "int8"):
        backend = open_backend("fsdp", with_adapter(base, quantize_base=kind), OPTIMIZER, seed=3)
        shapes: list[tuple[int, ...]] = []

        def note(one: torch.Tensor, shapes: list[tuple[int, ...]] = shapes) -> torch.Tensor:
            shapes.append(tuple(one.shape))
            return one

        with torch.autograd.graph.saved_tensors_hooks(note, lambda one: one):
            backend.step(batches, ratio_loss(batches, 9.0), 0.9, 1e-2)
        kept[kind] = set(shapes)
    down = (32, 48) if name == "dense" else (9, 32, 24)
    transposed = (*down[:-2], down[-1], down[-2])
    assert {down, transposed} & kept["none"]
    assert not {down, transposed} & kept["int8"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_reads_as_the_model_that_was_trained(kind: str, tmp_path: Path) -> None:
    base = saved_base(MODELS["experts"], tmp_path / "base")
    backend = open_backend("fsdp", with_adapter(base, quantize_base=kind), OPTIMIZER, seed=3)
    batches = pack(sequences(LENGTHS), 0, 1, 30)
    backend.step(batches, ratio_loss(batches, 9.0), 0.9, 1e-2)
    with backend.off_device():
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in backend._adapters.base.tensors())
    backend.save(tmp_path / "saved")
    assert not list((tmp_path / "saved").glob("*.safetensors"))
    named = FileSystemReader(tmp_path / "saved" / STATE_FOLDER).read_metadata().state_dict_metadata
    assert named
    assert not [name for name in named if is_quantized(name)]
    merged, published = open_weights(str(tmp_path / "saved")), as_dict(backend)
    assert merged is not None
    for name, tensor in published.items():
        torch.testing.assert_close(merged(name), tensor, rtol=0, atol=1e-6)
    source = adapted_model(ModelConfig(path=str(tmp_path / "saved")))
    assert source.adapter is not None
    assert source.adapter.quantize_base == kind
    resumed = open_backend("fsdp", source, OPTIMIZER)
    resumed.load(tmp_path / "saved")
    steps = [one.step(batches, ratio_loss(batches, 9.0), 0.9, 1e-2) for one in (backend, resumed)]
    assert steps[0] == steps[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_an_opened_base_holds_its_plan(kind: str, name: str, tmp_path: Path) -> None:
    model = with_adapter(replace(MODELS[name], dtype="bfloat16"), quantize_base=kind)
    backend, config = open_backend("fsdp", model, OPTIMIZER), load_config(model)
    assert model.adapter is not None
    planned = PlannedModel(
        shape=shape_of(config),
        learner=LearnerConfig(),
        dtype="bfloat16",
        adapter=adapter_parameters(config, model.adapter),
        quantized=quantized_weights(config, kind),
    )
    (held,) = plan_memory(planned)
    parameters = sum(one.nbytes for one in backend._module.parameters())
    assert held.parameters == parameters + sum(one.nbytes for one in backend._adapters.base.tensors())
    assert held.optimizer == 8 * sum(one.numel() for one in backend._parameters)


def test_nf4_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "is_installed", lambda _: False)
    with pytest.raises(ConfigError, match=r"nf4 needs bitsandbytes, .* 'headway\[quantized\]'"):
        open_backend("fsdp", with_adapter(MODELS["dense"], quantize_base="nf4"), OPTIMIZER)


def test_a_checkpoint_without_its_library_names_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    base = saved_base(MODELS["dense"], tmp_path / "base")
    backend = open_backend("fsdp", with_adapter(base, quantize_base="int8"), OPTIMIZER)
    backend.save(tmp_path / "saved")
    file = tmp_path / "saved" / "adapter" / "base.json"
    assert open_weights(str(tmp_path / "saved")) is not None
    file.write_text(file.read_text().replace("int8", "nf4"))
    monkeypatch.setattr(quantization, "is_installed", lambda _: False)
    with pytest.raises(ConfigError, match=rf"^model\.path: {file} says .* nf4, which needs bitsandbytes"):
        open_weights(str(tmp_path / "saved"))


def test_weights_of_broken_blocks_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "is_installed", lambda _: True)
    odd = model_config("qwen3", intermediate_size=47)
    with pytest.raises(ConfigError, match=r"whole blocks of 64 numbers, and .*gate_proj has 47 x 32\. Take int8"):
        open_backend("fsdp", with_adapter(odd, quantize_base="nf4"), OPTIMIZER)


def test_megatron_holds_no_quantized_base() -> None:
    with pytest.raises(ConfigError, match=r"quantize_base is int8, and learner\.backend=megatron holds the base in"):
        open_backend("megatron", with_adapter(MODELS["dense"], quantize_base="int8"), OPTIMIZER)
