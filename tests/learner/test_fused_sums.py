"""Products of matrices that add weights' gradients to their fp32 sums; see `learner/backends/fsdp/fused_sums.py`."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

from learner.backends.fsdp import fused_sums, sharded_model
from learner.backends.fsdp.backend import FsdpBackend
from learner.backends.fsdp.fused_sums import sum_linear_layers
from learner.backends.fsdp.layers import prepare_layers
from learner.backends.fsdp.policy import Policy
from learner.backends.fsdp.rounded import RoundedWeights
from learner.config import ComputeConfig
from tests.learner.test_cuda_graphs import Repeated, opened, recorder, trained

__all__ = ["recorder"]


def pair(
    monkeypatch: pytest.MonkeyPatch, dtype: str, options: dict[str, Any], **compute: Any
) -> tuple[FsdpBackend, FsdpBackend]:
    """Return a model that is rounded as a whole, as on a single GPU, without fused sums and with them."""
    monkeypatch.setattr(sharded_model, "stays_whole", lambda *_: True)
    plain, fused = (
        opened(ComputeConfig(cuda_graphs="never", fused_sums=is_fused, **compute), dtype, **options)
        for is_fused in (False, True)
    )
    assert plain._rounded is not None
    assert fused._rounded is not None
    assert not plain._rounded._summed
    return plain, fused


@pytest.mark.parametrize(
    ("architecture", "recompute"), [("qwen3", "none"), ("qwen2", "selective"), ("qwen3_moe", "full")]
)
def test_updates_are_those_of_sums_by_kernels_of_their_own(
    monkeypatch: pytest.MonkeyPatch, architecture: str, recompute: str
) -> None:
    """Over rows with shared tokens and without, prompts that skip the output head, and several updates."""
    plain, fused = pair(monkeypatch, "float32", {"architecture": architecture}, recompute=recompute)
    assert fused._rounded is not None
    linear = [part for part in fused._policy.modules() if isinstance(part, nn.Linear)]
    assert len(fused._rounded._summed) >= len(linear) - 1 > 0
    for only_trained in (False, True):
        expected, found = (trained(backend, steps=2, only_trained=only_trained) for backend in (plain, fused))
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-5, atol=2e-6)
    assert fused._rounded._sums == []
    assert {place.total for _, place in fused._rounded._summed.values()} == {None}, "it would keep the sums' memory"


def test_layers_in_bfloat16_differ_by_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU a product in bfloat16 is rounded before it is added. The head's sum is not rounded between rows."""
    plain, fused = pair(monkeypatch, "bfloat16", {})
    found = []
    for backend in (plain, fused):
        rounded, policy = backend._rounded, backend._policy
        assert rounded is not None
        assert isinstance(policy, Policy)
        rounded._summed = {i: one for i, one in rounded._summed.items() if one[1] is not policy._head_sum}
        found.append(trained(backend, steps=2))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses what torch deprecates
def test_a_compiled_layer_adds_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler sees sums with new memory in each update, and rows of other lengths, and compiles nothing anew."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    layers: list[Any] = []
    for is_fused in (False, True):
        torch.manual_seed(0)
        layer = nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8, bias=False))
        prepare_layers([layer], ComputeConfig(compile=True))
        sums = sum_linear_layers([layer], layer) if is_fused else {}
        weights = RoundedWeights(layer, torch.float32, stays=False, summed=sums)
        for update in range(3):
            weights.begin()
            for tokens in (5, 6 + update):
                with weights.in_place():
                    layer(torch.randn(1, tokens, 8, requires_grad=True)).square().sum().backward()
            weights.give()
        layers.append(layer)
    for one, other in zip(*(layer.parameters() for layer in layers), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-6, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def errors_of_sums(
    inputs: int, outputs: int, rows: tuple[int, int], device: str = "cpu", *, compiles: bool = False
) -> list[float]:
    """Return how far a linear layer's summed gradient is from float64's, of its norm, without fused sums and with
    them. `rows`: the shape of the first of eight inputs, each of which has a row more than the one before."""
    errors = []
    for is_fused in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(inputs, outputs)).to(device)
        sums = sum_linear_layers(model, model) if is_fused else {}
        weights = RoundedWeights(model, torch.bfloat16, stays=False, summed=sums)
        prepare_layers([model], ComputeConfig(compile=compiles))
        exact = torch.zeros(outputs, inputs, dtype=torch.float64, device=device)
        weights.begin()
        for number in range(8):
            shape = rows[0], rows[1] + number
            given = torch.randn(*shape, inputs, device=device).bfloat16()
            pull = torch.randn(*shape, outputs, device=device).bfloat16()
            with weights.in_place():
                model(given).backward(pull)
            exact += pull.double().flatten(0, 1).T @ given.double().flatten(0, 1)
        weights.give()
        weight, bias = model.parameters()
        assert weight.grad is not None
        assert bias.grad is not None
        errors.append(float((weight.grad.double() - exact).norm() / exact.norm()))
    return errors


def test_a_sum_is_closer_to_the_exact_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU adds, with products in fp32; a CPU cannot, so that another product stands in."""
    monkeypatch.setattr(fused_sums, "add_product", lambda total, left, right: total.addmm_(left.float(), right.float()))
    errors = errors_of_sums(32, 16, (3, 64))
    assert errors[1] < errors[0] / 100


def test_a_layer_is_called_twice() -> None:
    """Its second call's backward pass comes first, and changes the sum that the first call has seen."""
    gradients = []
    for is_fused in (False, True):
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(4, 4))
        sums = sum_linear_layers(layer, layer) if is_fused else {}
        weights = RoundedWeights(layer, torch.float32, stays=False, summed=sums)
        weights.begin()
        with weights.in_place():
            layer(layer(torch.randn(3, 4)).tanh()).square().sum().backward()
        weights.give()
        gradients.append([parameter.grad for parameter in layer.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(other, one)


def test_a_weight_that_no_row_reached_has_no_gradient() -> None:
    """The optimizer then leaves it as it is. One that is used twice has both gradients, of its product and its own."""
    model = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])
    used: Any = model[0]
    weights = RoundedWeights(model, torch.float32, stays=False, summed=sum_linear_layers(model, model))
    rows = torch.randn(3, 4)
    for _ in range(2):
        weights.begin()
        with weights.in_place():
            (used(rows).sum() + 2 * used.weight.sum()).backward()
        weights.give()
        torch.testing.assert_close(used.weight.grad, rows.sum(0).expand(4, 4) + 2)
        other: Any = model[1]
        assert other.weight.grad is None


def test_an_update_that_fails_leaves_no_sums() -> None:
    """A learner that outlives it may give the device's memory to another program."""
    layer = nn.Linear(4, 4)
    sums = sum_linear_layers([layer], layer)
    weights = RoundedWeights(layer, torch.float32, stays=False, summed=sums)
    weights.begin()
    assert all(place.total is not None for place in sums.values())
    weights.release()
    assert all(place.total is None for place in sums.values())
    assert not weights._sums


@pytest.mark.parametrize("options", [{}, {"has_adapter": True}])
def test_what_is_recorded_or_has_an_adapter_is_added_as_before(
    recorder: Repeated, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="learner")
    backend = opened(ComputeConfig(cuda_graphs="always", fused_sums=True), "bfloat16", **options)
    assert backend._rounded is not None
    assert not backend._rounded._summed
    assert "learner.compute.fused_sums changes nothing here" in caplog.text
