"""The passes of a shape are recorded, and replayed for the rows that it fits; those of all other rows are launched."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headway.learner.backends import open_backend
from headway.learner.backends.fsdp import backend as fsdp_backend
from headway.learner.backends.fsdp import cuda_graphs
from headway.learner.backends.fsdp.backend import FsdpValueBackend
from headway.learner.backends.fsdp.cuda_graphs import why_launched
from headway.learner.backends.fsdp.policy import Policy
from headway.learner.backends.fsdp.row import FsdpRow
from headway.learner.batching.packing import concatenate
from headway.learner.batching.padding import PaddedShape
from headway.learner.config import ComputeConfig
from tests.learner.recording import AUTO, NEVER, Repeated, given, opened, rows, trained
from tests.learner.tiny import OPTIMIZER, model_config, sequences


class Unrecordable(Repeated):
    """A recorder on which nothing can be recorded."""

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")


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


@pytest.mark.parametrize("problem", ["it cannot be recorded", "memory is short"])
def test_what_cannot_be_recorded_is_launched(
    problem: str, recorder: Repeated, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = trained(opened(NEVER), steps=3)
    if problem == "memory is short":
        recorder.room = False
    else:
        monkeypatch.setattr(fsdp_backend, "open_recorder", lambda _: Unrecordable())
    backend = opened(AUTO)
    with caplog.at_level("INFO", logger="headway.learner"):
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
    for times, batch in enumerate((large, small, *[other] * (cuda_graphs.OFTEN - 1), small)):
        (found,), (expected,) = (one.logprobs([batch], 0.8) for one in (backend, plain))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        assert [kind.shape for kind in backend._replayed._recorded] == (
            [] if times == 0 else shapes[:1] if times <= cuda_graphs.OFTEN else shapes[:2]
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
    for batch in (large, *[small] * (cuda_graphs.OFTEN + 1)):
        assert backend.logprobs([batch], 0.8)
    assert backend._replayed is not None
    assert backend._replayed.num_recorded == 2
    assert [calls.count(True) for calls in computed.values()] == [1, 1]
    assert [calls[0] for calls in computed.values()] == [False, False]


def test_no_graph_is_dropped_for_another(recorder: Repeated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of further shapes are launched."""
    monkeypatch.setattr(cuda_graphs, "MOST_RECORDED", 2)
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
