"""Passes that are recorded for one row and replayed for others of its shape train as launched ones."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import headway.learner.models.attention
from headway.algorithms.presets import PRESETS
from headway.broker.schema import Group
from headway.learner.backends.fsdp import backend as fsdp_backend
from headway.learner.backends.fsdp.backend import FsdpBackend
from headway.learner.backends.fsdp.cuda_graphs import CudaGraphReplay
from headway.learner.backends.fsdp.optimizer import RoundedWeights
from headway.learner.backends.fsdp.policy import Policy
from headway.learner.backends.fsdp.sharding import local
from headway.learner.batching.packing import concatenate
from headway.learner.models.pretrained import load_model
from headway.learner.objective.composition import needs_reference
from headway.learner.objective.update import Update
from tests.learner.recording import ALWAYS, AUTO, NEVER, Repeated, given, kernel, opened, rows, trained
from tests.learner.test_presets import build, configured, sampled
from tests.learner.tiny import model_config

OF_SEVERAL_UPDATES = {"grpo", "ppo", "m2po", "online_dpo"}


@pytest.mark.slow
@pytest.mark.parametrize("has_adapter", [False, True])
def test_replayed_rows_train_as_launched_ones(recorder: Repeated, has_adapter: bool) -> None:
    launched, replayed = (opened(compute, has_adapter=has_adapter) for compute in (NEVER, ALWAYS))
    assert launched._replayed is None
    assert replayed._replayed is not None
    expected, found = trained(launched), trained(replayed)
    assert replayed._replayed.num_recorded == 6, "three shapes without a gradient, and three with one"
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)


def test_replayed_gradients_are_those_of_the_plain_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last row takes the shape of a larger one."""
    monkeypatch.setattr(headway.learner.models.attention, "varlen_attn", kernel)
    model: Any = load_model(model_config("qwen3"), 1)
    policy = Policy(model.double(), on_cpu=True, half_precision=False)
    weights = RoundedWeights(policy, torch.float64)
    replayed = CudaGraphReplay(policy, weights, Repeated())
    large, small = (
        concatenate([one for seed in range(size) for one in given(seed, True)], is_tree=True) for size in (27, 23)
    )
    for batches in (rows(0), rows(1), [large], [large], [small]):
        weights.begin()
        for number, batch in enumerate(batches):
            wanted = policy(batch, 0.7)
            pull = torch.linspace(-1, 2, wanted.numel(), dtype=wanted.dtype).view_as(wanted) * (1 + number)
            (wanted * pull).sum().backward()
            with weights.in_place():
                found = replayed(batch, 0.7)
                (found * pull).sum().backward()
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
        expected = [parameter.grad for parameter in policy.parameters()]
        weights.give()
        for parameter, gradient in zip(policy.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-9, atol=1e-9)
        policy.zero_grad()
    assert replayed.num_recorded == 4


def test_bfloat16_is_replayed_as_it_is_launched(recorder: Repeated) -> None:
    """Padding takes part in no sum but as zeros, and the kernel's stand-in has one order of them."""
    launched, replayed = opened(NEVER, "bfloat16"), opened(AUTO, "bfloat16")
    for one, other in zip(trained(launched), trained(replayed), strict=True):
        torch.testing.assert_close(other, one, rtol=0.05, atol=0.05)


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    _, backend = build(configured("grpo"))
    return sampled(backend, range(3))


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "bonus"), [*((preset, 0.0) for preset in PRESETS), ("grpo", 0.5)])
def test_an_updater_trains_alike(
    preset: str, bonus: float, groups: list[Group], recorder: Repeated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses and norms of the first update agree to 1e-6; rounding grows in the later ones."""
    config = configured(preset, entropy_coefficient=bonus)
    launched, replayed = list[Update](), list[Update]()
    for is_replayed, updates in ((False, launched), (True, replayed)):
        monkeypatch.setattr(fsdp_backend, "why_launched", lambda *_, is_replayed=is_replayed, **__: not is_replayed)
        updater, backend = build(config, has_reference=needs_reference(config), prefix_sharing="always")
        assert isinstance(backend, FsdpBackend)
        assert (backend._replayed is not None) is is_replayed
        for _ in range(3 if preset in OF_SEVERAL_UPDATES else 1):
            updates.append(updater.update(updater.pack(updater.compute_advantages(groups, 0).sequences), 0))
        assert backend._replayed is None or backend._replayed.num_recorded > 0
    for number, (one, other) in enumerate(zip(launched, replayed, strict=True)):
        for wanted, found in ((one.loss, other.loss), (one.grad_norm, other.grad_norm)):
            torch.testing.assert_close(found, wanted, rtol=1e-4 if number else 1e-6, atol=1e-6)


@pytest.mark.parametrize(("first", "has_adapter"), [("never", False), ("auto", False), ("auto", True)])
def test_a_checkpoint_is_resumed_with_graphs_and_without(
    first: str, has_adapter: bool, tmp_path: Path, recorder: Repeated
) -> None:
    """FSDP's shards of one rank and whole parameters are one state: masters, moments and exported weights."""
    one, other = (AUTO, NEVER) if first == "auto" else (NEVER, AUTO)
    before = opened(one, "bfloat16", has_adapter=has_adapter)
    after = opened(other, "bfloat16", seed=1 if has_adapter else 2, has_adapter=has_adapter)  # of the same base
    trained(before, steps=2)
    before.save(tmp_path / "checkpoint")
    after.load(tmp_path / "checkpoint")
    kept, loaded = ([local(tensor).clone() for tensor in backend._held()] for backend in (before, after))
    assert len(kept) == len(loaded)
    for tensor, same in zip(kept, loaded, strict=True):
        assert torch.equal(tensor, same)
    for (name, tensor), (same_name, same) in zip(before.named_tensors(), after.named_tensors(), strict=True):
        assert name == same_name
        assert torch.equal(tensor, same)


def test_graphs_are_gone_before_the_model_leaves_its_device(recorder: Repeated) -> None:
    stays, leaves = opened(AUTO), opened(AUTO)
    expected = trained(stays)
    trained(leaves, steps=2)
    assert leaves._rounded is not None
    assert leaves._replayed is not None
    assert leaves._replayed.num_recorded
    dropped = [weakref.ref(tensor) for tensor in (*leaves._rounded.copies, *leaves._rounded._sums)]
    with leaves.off_device():
        assert leaves._replayed.num_recorded == 0
        gc.collect()
        assert [one() for one in dropped] == [None] * len(dropped)
        assert {local(tensor).untyped_storage().nbytes() for tensor in leaves._held()} == {0}
    found = trained(leaves, steps=2, first=2)
    for one, other in zip(expected[-len(found) :], found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)
    assert leaves._replayed.num_recorded == 0, "the memory would be another one after each sleep"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses what torch deprecates
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("has_adapter", [False, True])
@pytest.mark.parametrize("only_trained", [False, True])
def test_graphs_on_a_gpu_are_padded_rows_to_the_bit(
    monkeypatch: pytest.MonkeyPatch, has_adapter: bool, only_trained: bool
) -> None:
    found = []
    for recorder in (Repeated, None):
        if recorder is not None:
            monkeypatch.setattr(fsdp_backend, "open_recorder", lambda _: Repeated())
        compute = ALWAYS if has_adapter or only_trained else AUTO
        backend = opened(compute, "bfloat16", device="cuda", has_adapter=has_adapter)
        found.append([tensor.cpu() for tensor in trained(backend, only_trained=only_trained)])
        assert backend._replayed is not None
        assert backend._replayed.num_recorded >= 5
        monkeypatch.undo()
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
