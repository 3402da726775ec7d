"""Passes that are recorded for one row and replayed for others of its shape: on a CPU the replay is another call, and
written-out attention stands in for the kernel, so that all but the recording itself is what a GPU does."""

import dataclasses
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import learner.models.attention
from algorithms.presets import PRESETS
from broker.schema import Group
from learner.backends import open_backend
from learner.backends.fsdp import replayed_rows, sharded_model
from learner.backends.fsdp.backend import FsdpBackend, FsdpValueBackend
from learner.backends.fsdp.policy import Policy
from learner.backends.fsdp.recording import why_launched
from learner.backends.fsdp.replayed_rows import ReplayedRows
from learner.backends.fsdp.rounded import RoundedWeights
from learner.backends.fsdp.row import FsdpRow
from learner.backends.fsdp.sharding import local
from learner.config import ComputeConfig
from learner.models.model import load_model
from learner.objective.composition import needs_reference
from learner.objective.update import Update
from learner.rows.batch import PackedBatch
from learner.rows.packing import PackableSequence, concatenate
from learner.rows.padding import PaddedShape
from tests.learner.adapted import with_adapter
from tests.learner.test_prefix_trees import one_by_one, sharing
from tests.learner.test_presets import build, configured, sampled
from tests.learner.tiny import OPTIMIZER, model_config, ratio_loss, sequences

NEVER, AUTO = ComputeConfig(cuda_graphs="never"), ComputeConfig(cuda_graphs="auto")
ALWAYS = ComputeConfig(cuda_graphs="always")
OF_SEVERAL_UPDATES = {"grpo", "ppo", "m2po", "online_dpo"}
Dtype = Any


class Repeated:
    """A recorder that makes the recorded call again. It never runs out of memory, unless a test says so."""

    room = True

    def warm_up(self, call: Callable[[], object]) -> None:
        call()

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        return call

    def has_room(self) -> bool:
        return self.room


class Unrecordable(Repeated):
    """A recorder on which nothing can be recorded."""

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")


class _Poisoned(torch.autograd.Function):
    """Rows of which all but the first have a gradient of no meaning: the kernel leaves it as it finds it."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, real: int) -> torch.Tensor:
        ctx.real = real
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        poisoned = gradients[0].clone()
        poisoned[ctx.real :] = torch.nan
        return poisoned, None


def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: Any, cu_keys: Any, *_: int, **options: Any) -> Any:
    """Stand in for the variable-length kernel."""
    k, v = (_Poisoned.apply(rows, int(cu_keys[-1])) for rows in (k, v))
    return one_by_one(q, k, v, cu, cu_keys, options["scale"])


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Repeated:
    """Let a model on a CPU be recorded, whatever its dtype."""
    made = Repeated()
    monkeypatch.setattr(learner.models.attention, "varlen_attn", kernel)
    monkeypatch.setattr(sharded_model, "open_recorder", lambda _: made)
    monkeypatch.setattr(sharded_model, "why_launched", lambda *_, **__: "")
    return made


def opened(
    compute: ComputeConfig,
    dtype: Dtype = "float32",
    seed: int = 1,
    *,
    has_adapter: bool = False,
    architecture: str = "qwen3",
    device: str = "cpu",
) -> FsdpBackend:
    model = model_config(architecture, dtype=dtype)
    model = with_adapter(model) if has_adapter else model
    backend = open_backend("fsdp", model, OPTIMIZER, seed=seed, device=device, compute=compute)
    assert isinstance(backend, FsdpBackend)
    return backend


def rows(seed: int) -> list[PackedBatch]:
    """Return a row that shares tokens and two that do not; with another seed they have the same padded shapes."""
    given = [*sharing(4, prompt=6, agreed=3, seed=seed), *sequences([5, 1, 7], seed)]
    wide = dataclasses.replace(concatenate(sequences([9, 4], seed)), wants_confidence=True)
    return [concatenate(given, is_tree=True), concatenate(sequences([8, 20, 2], seed)), wide]


def trained(backend: FsdpBackend, steps: int = 4, first: int = 0, *, only_trained: bool = False) -> list[torch.Tensor]:
    """Return losses, norms, logprobs and weights of a few updates, each over new rows of the same shapes."""
    found: list[torch.Tensor] = []
    for seed in range(first, first + steps):
        batches = [dataclasses.replace(batch, only_trained=only_trained) for batch in rows(seed)]
        found += backend.logprobs(batches, 0.8)
        loss, norm, reports = backend.step(batches[:2], ratio_loss(batches, 30.0), 0.8, 1e-3)
        found += [torch.tensor(loss), torch.tensor(norm), torch.tensor(reports[0]["tokens"])]
    return found + [tensor.float() for _, tensor in backend.named_tensors()]


def test_rows_of_a_shape_differ_in_contents_alone(recorder: Repeated) -> None:
    policy = opened(AUTO)._policy
    assert isinstance(policy, Policy)
    for one, other in zip(rows(0), rows(1), strict=True):
        shape = PaddedShape.of(one)
        assert shape == PaddedShape.of(other)
        first, second = (policy.padded_row(batch, shape) for batch in (one, other))
        assert [tensor.shape for tensor in first.tensors] == [tensor.shape for tensor in second.tensors]
        assert first.layout.max_seqlen == second.layout.max_seqlen
        assert not torch.equal(first.token_ids_N, second.token_ids_N)


@pytest.mark.parametrize("has_adapter", [False, True])
def test_replayed_rows_train_as_launched_ones(recorder: Repeated, has_adapter: bool) -> None:
    launched, replayed = (opened(compute, has_adapter=has_adapter) for compute in (NEVER, ALWAYS))
    assert launched._replayed is None
    assert replayed._replayed is not None
    expected, found = trained(launched), trained(replayed)
    assert replayed._replayed.num_recorded == 5, "three shapes without a gradient, two with one"
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)


def test_replayed_gradients_are_those_of_the_plain_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last row takes the shape of a larger one."""
    monkeypatch.setattr(learner.models.attention, "varlen_attn", kernel)
    model: Any = load_model(model_config("qwen3"), 1)
    policy = Policy(model.double(), on_cpu=True, half_precision=False)
    weights = RoundedWeights(policy, torch.float64)
    replayed = ReplayedRows(policy, weights, Repeated())
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


@pytest.mark.parametrize("has_adapter", [False, True])
def test_rounded_weights_are_those_of_fsdp_to_the_bit(recorder: Repeated, has_adapter: bool) -> None:
    """Rows that are launched differ by nothing: neither in the passes nor in the sums over micro-batches."""
    sharded, rounded = (opened(compute, "bfloat16", has_adapter=has_adapter) for compute in (NEVER, ALWAYS))
    assert rounded._replayed is not None
    rounded._replayed.stop("a test")
    for one, other in zip(trained(sharded), trained(rounded), strict=True):
        assert torch.equal(one, other)


def test_bfloat16_is_replayed_as_it_is_launched(recorder: Repeated) -> None:
    """Padding takes part in no sum but as zeros, and the kernel's stand-in has one order of them."""
    launched, replayed = opened(NEVER, "bfloat16"), opened(AUTO, "bfloat16")
    for one, other in zip(trained(launched), trained(replayed), strict=True):
        torch.testing.assert_close(other, one, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("options", "compute"),
    [
        ({}, {}),
        ({"has_adapter": True}, {}),
        ({"architecture": "qwen3_moe"}, {}),
        ({}, {"recompute": "full"}),
        ({}, {"offload_optimizer": True}),
    ],
)
def test_a_model_of_a_single_gpu_is_rounded_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], compute: dict[str, Any]
) -> None:
    """Its updates are those of FSDP to the bit, and copies and sums have no memory between two of them."""
    never = ComputeConfig(cuda_graphs="never", **compute)
    sharded = opened(never, "bfloat16", **options)
    monkeypatch.setattr(sharded_model, "stays_whole", lambda *_: True)
    whole = opened(never, "bfloat16", **options)
    assert whole._replayed is None
    assert whole._rounded is not None
    for one, other in zip(trained(sharded), trained(whole), strict=True):
        assert torch.equal(one, other)
    assert {copy.untyped_storage().nbytes() for copy in whole._rounded.copies} == {0}
    assert whole._rounded._sums == []
    with whole.off_device():
        assert {local(tensor).untyped_storage().nbytes() for tensor in whole._held()} == {0}
    for one, other in zip(trained(sharded), trained(whole), strict=True):
        assert torch.equal(one, other)


def test_an_update_that_fails_leaves_no_sums() -> None:
    """A learner that outlives it may give the device's memory to another program."""
    linear = torch.nn.Linear(3, 2)
    weights = RoundedWeights(linear, torch.bfloat16, stays=False)
    weights.begin()
    with weights.in_place():
        linear(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    assert all(total is not None for total in weights._sums)
    weights.release()
    assert weights._sums == []


def test_recorded_passes_find_weights_and_sums_where_they_were(recorder: Repeated) -> None:
    """A graph reads and writes by address."""
    backend = opened(AUTO, "bfloat16")
    trained(backend, steps=1)
    assert backend._rounded is not None
    held = [*backend._rounded.copies, *(total for total in backend._rounded._sums if total is not None)]
    places = [tensor.data_ptr() for tensor in held]
    assert len(places) == 2 * len(backend._parameters)
    trained(backend, steps=2)
    assert [tensor.data_ptr() for tensor in held] == places
    assert [one is other for one, other in zip(held, backend._rounded.copies, strict=False)] == [True] * (
        len(held) // 2
    )


def test_a_frozen_parameter_is_rounded_once() -> None:
    linear = torch.nn.Linear(3, 2)
    linear.bias.requires_grad_(False)
    weights = RoundedWeights(linear, torch.bfloat16)
    with weights.in_place():
        assert linear(torch.ones(1, 3, dtype=torch.bfloat16)).dtype is torch.bfloat16
    assert (linear.weight.dtype, linear.bias.dtype) == (torch.float32, torch.bfloat16)


def test_the_base_of_an_adapter_is_neither_copied_nor_changed(recorder: Repeated) -> None:
    backend = opened(AUTO, "bfloat16", has_adapter=True)
    frozen = {name: p for name, p in backend._policy.named_parameters() if not p.requires_grad}
    before = {name: parameter.clone() for name, parameter in frozen.items()}
    trained(backend)
    assert backend._rounded is not None
    assert len(backend._rounded.copies) == len(backend._rounded._sums) == len(backend._parameters)
    for name, parameter in backend._policy.named_parameters():
        if name in before:
            assert parameter is frozen[name]
            assert torch.equal(parameter, before[name])


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    _, backend = build(configured("grpo"))
    return sampled(backend, range(3))


@pytest.mark.parametrize("preset", PRESETS)
def test_an_updater_trains_alike(
    preset: str, groups: list[Group], recorder: Repeated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses and norms of the first update agree to 1e-6; rounding grows in the later ones."""
    config = configured(preset)
    launched, replayed = list[Update](), list[Update]()
    for is_replayed, updates in ((False, launched), (True, replayed)):
        monkeypatch.setattr(sharded_model, "why_launched", lambda *_, is_replayed=is_replayed, **__: not is_replayed)
        updater, backend = build(config, has_reference=needs_reference(config), prefix_sharing="always")
        assert isinstance(backend, FsdpBackend)
        assert (backend._replayed is not None) is is_replayed
        for _ in range(3 if preset in OF_SEVERAL_UPDATES else 1):
            updates.append(updater.update(updater.pack(updater.judge(groups, 0).sequences), 0))
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


@pytest.mark.parametrize("problem", ["it cannot be recorded", "memory is short"])
def test_what_cannot_be_recorded_is_launched(
    problem: str, recorder: Repeated, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = trained(opened(NEVER), steps=3)
    if problem == "memory is short":
        recorder.room = False
    else:
        monkeypatch.setattr(sharded_model, "open_recorder", lambda _: Unrecordable())
    backend = opened(AUTO)
    with caplog.at_level("INFO", logger="learner"):
        found = trained(backend, steps=3)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)
    assert backend._replayed is not None
    assert backend._replayed.num_recorded == 0
    said = [record.message for record in caplog.records]
    assert len(said) == 1
    assert ("capturing" if problem == "it cannot be recorded" else "memory free") in said[0]


@pytest.mark.parametrize("is_tree", [False, True])
def test_a_row_takes_a_larger_shape_that_is_known(is_tree: bool, recorder: Repeated) -> None:
    backend, plain = opened(AUTO), opened(NEVER)
    assert backend._replayed is not None
    sizes = (27, 23, 24) if is_tree else (55, 49, 50)
    large, small, other = (
        concatenate([one for seed in range(size) for one in given(seed, is_tree)], is_tree=is_tree) for size in sizes
    )
    shapes = [PaddedShape.of(batch) for batch in (large, small, other)]
    assert shapes[0] != shapes[1] == shapes[2]
    for times, batch in enumerate((large, small, *[other] * (replayed_rows.OFTEN - 1), small)):
        (found,), (expected,) = (one.logprobs([batch], 0.8) for one in (backend, plain))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        assert [kind.shape for kind in backend._replayed._recorded] == (
            [] if times == 0 else shapes[:1] if times <= replayed_rows.OFTEN else shapes[:2]
        )
    (tiny,) = backend.logprobs([concatenate(sequences([9]))], 0.8)
    torch.testing.assert_close(tiny, plain.logprobs([concatenate(sequences([9]))], 0.8)[0], rtol=1e-6, atol=1e-6)
    assert backend._replayed.num_recorded == 2, "a much smaller row does not take it"


def test_no_shape_is_first_computed_within_a_recording(recorder: Repeated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of a shape may be compiled or loaded with its first row. A shape whose rows took a larger one until it
    had come often enough has had none."""
    is_recording = False
    computed: dict[int, list[bool]] = {}
    token_values = Policy.token_values

    def record(call: Callable[[], None]) -> Callable[[], None]:
        nonlocal is_recording
        is_recording = True
        call()
        is_recording = False
        return call

    def counted(policy: Policy, row: FsdpRow, *args: Any, **options: Any) -> torch.Tensor:
        computed.setdefault(len(row.token_ids_N), []).append(is_recording)
        return token_values(policy, row, *args, **options)

    monkeypatch.setattr(recorder, "record", record)
    monkeypatch.setattr(Policy, "token_values", counted)
    backend = opened(AUTO)
    large, small = (
        concatenate([one for seed in range(size) for one in given(seed, is_tree=False)]) for size in (55, 49)
    )
    for batch in (large, *[small] * (replayed_rows.OFTEN + 1)):
        assert backend.logprobs([batch], 0.8)
    assert backend._replayed is not None
    assert backend._replayed.num_recorded == 2
    assert [calls.count(True) for calls in computed.values()] == [1, 1]
    assert [calls[0] for calls in computed.values()] == [False, False]


def given(seed: int, is_tree: bool) -> list[PackableSequence]:
    return sharing(4, prompt=20, agreed=3, seed=seed) if is_tree else sequences([20], seed)


def test_no_graph_is_dropped_for_another(recorder: Repeated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of further shapes are launched."""
    monkeypatch.setattr(replayed_rows, "MOST_RECORDED", 2)
    backend = opened(AUTO)
    (tree, plain, wide), expected = rows(0), opened(NEVER).logprobs(rows(0), 0.8)
    for _ in range(2):
        assert backend.logprobs([tree, plain], 0.8)
    assert backend._replayed is not None
    kept = dict(backend._replayed._recorded)
    assert len(kept) == 2
    for _ in range(3):
        found = backend.logprobs([tree, plain, wide], 0.8)
    assert backend._replayed._recorded == kept
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-6)


def test_padding_has_the_first_position(recorder: Repeated) -> None:
    """A model of few learned positions takes a row that is padded by more than these."""
    _, plain, _ = rows(0)
    shape = PaddedShape.of(plain)
    positions = shape.positions_of(plain)
    assert positions.padding > int(plain.position_ids_T.max())
    assert positions.position_ids(plain).max() == plain.position_ids_T.max()


def test_a_row_cannot_go_backward_after_another_went_forward(recorder: Repeated) -> None:
    """All graphs share one pool, so the other one has overwritten its activations."""
    backend = opened(AUTO)
    trained(backend, steps=2)
    tree, plain, _ = rows(5)
    assert backend._rounded is not None
    with backend._rounded.in_place():
        found = backend._forward(tree, 0.8)
        backend._forward(plain, 0.8)
        with pytest.raises(AssertionError, match="another row went forward"):
            found.sum().backward()


PLAIN: dict[str, Any] = {
    "ranks": 1,
    "parameters": 135_000_000,
    "is_rounded": True,
    "has_adapter": False,
    "drops_activations": False,
    "is_quantized": False,
    "has_experts": False,
    "has_window": False,
}


@pytest.mark.parametrize(
    ("others", "compute", "reason"),
    [
        ({}, {}, ""),
        ({}, {"compile": True}, ""),
        ({}, {"cuda_graphs": "never"}, "learner.compute.cuda_graphs is never"),
        ({}, {"recompute": "full"}, "learner.compute.recompute is full"),
        ({}, {"offload_optimizer": True}, "learner.compute.offload_optimizer is true"),
        ({"ranks": 2}, {}, "the model is spread over 2 ranks"),
        ({"parameters": 8_000_000_000}, {}, "the model has more than 1,073,741,824 parameters"),
        ({"is_rounded": False}, {}, "model.dtype is float32"),
        ({"has_adapter": True}, {}, "an adapter is trained, which takes learner.compute.cuda_graphs=always"),
        ({"has_adapter": True}, {"cuda_graphs": "always"}, ""),
        ({"drops_activations": True}, {}, "model.adapter.dropout is above 0"),
        ({"is_quantized": True}, {}, "model.adapter.quantize_base is set"),
        ({"has_experts": True}, {}, "the model has experts"),
        ({"has_window": True}, {}, "the model's attention has a window"),
    ],
)
def test_the_reason_for_launching_is_said(others: dict[str, Any], compute: dict[str, Any], reason: str) -> None:
    config = ComputeConfig(**{"cuda_graphs": "auto", **compute})
    assert why_launched(config, **{**PLAIN, **others}) == reason


def test_a_cpu_and_a_critic_have_no_graphs(recorder: Repeated, monkeypatch: pytest.MonkeyPatch) -> None:
    critic = open_backend("fsdp", model_config("qwen3"), OPTIMIZER, compute=AUTO, head="value")
    assert isinstance(critic, FsdpValueBackend)
    assert critic._replayed is None
    monkeypatch.undo()
    assert opened(AUTO)._replayed is None


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
            monkeypatch.setattr(sharded_model, "open_recorder", lambda _: Repeated())
        compute = ALWAYS if has_adapter or only_trained else AUTO
        backend = opened(compute, "bfloat16", device="cuda", has_adapter=has_adapter)
        found.append([tensor.cpu() for tensor in trained(backend, only_trained=only_trained)])
        assert backend._replayed is not None
        assert backend._replayed.num_recorded >= 5
        monkeypatch.undo()
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
