# mypy: disable-error-code="arg-type, operator"
"""Settings that trade memory against time change no result."""

import contextlib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from headway.broker.errors import ConfigError
from headway.learner.backends import open_backend
from headway.learner.backends.base import Backend
from headway.learner.backends.fsdp.policy import Policy, fuse_norms, prepare_layers
from headway.learner.backends.fsdp.row import ContextGroup
from headway.learner.batching.packing import concatenate, pack
from headway.learner.config import ComputeConfig, LayoutConfig
from headway.learner.models.pretrained import load_model
from tests.learner import compiled_layers
from tests.learner.tiny import OPTIMIZER, model_config, ratio_loss, sequences, share
from tests.learner.torchrun import run_alone

LENGTHS = [7, 12, 5, 20, 3, 9]
LAYERS = 2


class Operations(TorchDispatchMode):
    """Counts the operations that run while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def gradients(compute: ComputeConfig, architecture: str) -> tuple[dict[str, torch.Tensor], Counter[str]]:
    """Return the gradients of one backward pass, and the number of operations that it ran."""
    policy = Policy(load_model(model_config(architecture), 1), on_cpu=True, half_precision=False)
    prepare_layers(policy.layers, compute)
    batch = concatenate(sequences(LENGTHS))
    loss = share(batch, policy(batch, 0.8), 10.0)
    with Operations() as operations:
        loss.backward()
    return {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}, operations.count


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_recomputation_runs_again_what_it_says_and_changes_no_gradient(architecture: str) -> None:
    expected, none = gradients(ComputeConfig(), architecture)
    matrices = 6 * LAYERS  # a dense layer's seventh is its last operation, whose result no later one needs
    for recompute, again in (("selective", 0), ("full", matrices)):
        got, count = gradients(ComputeConfig(recompute=recompute), architecture)
        assert got.keys() == expected.keys()
        assert all(torch.equal(gradient, expected[name]) for name, gradient in got.items())
        if architecture == "qwen3":
            assert count["aten::mm"] - none["aten::mm"] == again
        assert (none["aten::silu"], count["aten::silu"] > 0) == (0, True)
        attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
        assert (count[attention] > 0) is (recompute == "full")


@pytest.mark.slow
def test_layers_of_any_number_and_length_are_compiled_once() -> None:
    """A process of its own does it: what torch has compiled for other tests changes what it compiles."""
    run_alone(compiled_layers.__name__)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_moments_in_cpu_memory_make_the_same_steps(architecture: str, tmp_path: Path) -> None:
    def opened(offload: bool) -> Backend:
        compute = ComputeConfig(offload_optimizer=offload)
        return open_backend("fsdp", model_config(architecture), OPTIMIZER, seed=3, compute=compute)

    def step(backend: Backend, seed: int) -> None:
        batches = pack(sequences(LENGTHS, seed=seed), 0, 1, 30)
        backend.step(batches, ratio_loss(batches, 10.0), 0.9, 1e-3)

    kept, offloaded, resumed = opened(False), opened(True), opened(True)
    for seed in (0, 1):
        step(kept, seed)
        step(offloaded, seed)
    offloaded.save(tmp_path / "checkpoint")
    resumed.load(tmp_path / "checkpoint")
    for backend in (kept, offloaded, resumed):
        step(backend, 2)
    expected = {name: tensor.clone() for name, tensor in kept.named_tensors()}
    for name, tensor in offloaded.named_tensors():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)
    assert_bit_identical(resumed, offloaded)


def assert_bit_identical(backend: Backend, other: Backend) -> None:
    expected = {name: tensor.clone() for name, tensor in other.named_tensors()}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in backend.named_tensors())


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3MoeRMSNorm, Olmo2RMSNorm])
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
def test_a_fused_norm_is_the_models_own(kind: type[torch.nn.Module], dtype: torch.dtype, rounding: float) -> None:
    """In bfloat16 they agree up to a unit in the last place, because transformers rounds twice and torch once."""
    generator = torch.Generator().manual_seed(0)
    norms = torch.nn.ModuleList([kind(64), kind(64)]).to(dtype)
    weight = torch.randn(64, generator=generator).to(dtype)
    for norm in norms:
        norm.weight.data.copy_(weight)
    fuse_norms(norms[:1])
    assert "forward" in vars(norms[0])
    rows = (10 * torch.randn(50, 64, generator=generator)).to(dtype)
    fused, own = (norm(rows) for norm in norms)
    assert fused.dtype == own.dtype == dtype
    torch.testing.assert_close(fused, own, rtol=rounding, atol=1e-6)
    exact = torch.nn.functional.rms_norm(rows.double(), (64,), weight.double(), 1e-6)
    assert (fused - exact).abs().max() <= (own - exact).abs().max() + 1e-6


def test_a_norm_of_other_arithmetic_stays() -> None:
    norm = Gemma2RMSNorm(64)
    fuse_norms(norm)
    assert "forward" not in vars(norm)


@pytest.mark.parametrize("name", ["tensor", "pipeline", "virtual_pipeline", "expert", "expert_tensor"])
def test_layouts_of_megatron_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"layout.{name} is 2, and learner.backend=fsdp splits by context alone"):
        open_backend("fsdp", model_config("qwen3"), OPTIMIZER, layout=LayoutConfig(**{name: 2}))


@pytest.mark.parametrize(
    ("size", "heads", "key_value_heads", "fits"),
    [(2, 4, 2, True), (4, 4, 2, True), (3, 4, 2, False), (4, 12, 6, False)],
)
def test_heads_are_shared_evenly_or_not_at_all(size: int, heads: int, key_value_heads: int, fits: bool) -> None:
    context = ContextGroup()
    context.size = size
    config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=key_value_heads)
    with contextlib.nullcontext() if fits else pytest.raises(ConfigError, match=f"context={size} .* {heads} attention"):
        context.check_heads(config)


def test_what_cannot_be_shared_or_compiled_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"processes = 1 .* cannot be divided by tensor . pipeline . context = 2"):
        open_backend("fsdp", model_config("qwen3"), OPTIMIZER, layout=LayoutConfig(context=2))
    with pytest.raises(ConfigError, match="compile=true needs learner"):
        open_backend("fsdp", model_config("qwen3"), OPTIMIZER, compute=ComputeConfig(compile=True))
