import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import headway.learner.backends.token_logprobs as token_logprobs_module
from headway.learner.backends.token_logprobs import confident_logprobs, open_head, token_logprobs
from tests.learner.torchrun import run_ranks

TOKENS, WIDTH, VOCABULARY = 23, 8, 19


def given(padded: int = VOCABULARY, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Return hidden_TH, weight_VH, targets_T and the gradient that flows back through the logprobs."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for rows in (TOKENS, padded)
    )
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    return [hidden, weight, targets, torch.randn(TOKENS, generator=generator, dtype=torch.float64)]


def oracle(temperature: float, padded: int = VOCABULARY) -> dict[str, torch.Tensor]:
    """Return log softmax written out over the real vocabulary, differentiated by autograd."""
    hidden, weight, targets, pull = given(padded)
    log_softmax = ((hidden @ weight[:VOCABULARY].T) / temperature).log_softmax(-1)
    logprobs = log_softmax[torch.arange(TOKENS), targets]
    hidden_grad, weight_grad = torch.autograd.grad(logprobs, (hidden, weight), pull, retain_graph=True)
    likeliest, entropy = log_softmax.amax(1), -(log_softmax.exp() * log_softmax).sum(1)
    confidence = torch.stack([likeliest, entropy], 1).detach()
    results = {"logprobs": logprobs.detach(), "hidden": hidden_grad, "weight": weight_grad, "confidence": confidence}
    return results | gradients_with_entropy(logprobs, entropy, hidden, weight, pull)


def gradients_with_entropy(
    logprobs: torch.Tensor, entropy: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, pull: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the gradients of a loss of both."""
    pulled = (logprobs, entropy), (hidden, weight), (pull, pull.flip(0))
    return dict(zip(("hidden_with_entropy", "weight_with_entropy"), torch.autograd.grad(*pulled), strict=True))


def assert_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("rows", [1, 5, 22, 23, 1000])
@pytest.mark.parametrize("padded", [VOCABULARY, 26])
@pytest.mark.parametrize("keeps", [False, True])
def test_any_chunk_equals_log_softmax_and_its_gradients(
    temperature: float, rows: int, padded: int, keeps: bool
) -> None:
    hidden, weight, targets, pull = given(padded)
    options: dict[str, Any] = {"vocabulary": VOCABULARY, "logits_per_chunk": rows * padded + padded // 2}
    options["keeps"] = keeps
    logprobs = token_logprobs(hidden, weight, targets, temperature, **options)
    found = confident_logprobs(hidden, weight, targets, temperature, **options)
    with_entropy = gradients_with_entropy(found[:, 0], found[:, 2], hidden, weight, pull)
    found = confident_logprobs(hidden, weight, targets, temperature, **options)
    for pulled in (logprobs, found[:, 0]):  # the second has an entropy that nothing is pulled through
        hidden_grad, weight_grad = torch.autograd.grad(pulled, (hidden, weight), pull)
        got = {"logprobs": pulled.detach(), "hidden": hidden_grad, "weight": weight_grad, **with_entropy}
        assert_equal(got | {"confidence": found[:, 1:].detach()}, oracle(temperature, padded))
    best = (hidden @ weight[:VOCABULARY].T).argmax(1)
    targets = targets.where(torch.arange(TOKENS) % 2 == 0, best)
    found = confident_logprobs(hidden, weight, targets, temperature, **options)
    assert torch.equal(found[:, 0] == found[:, 1], targets == best), "the likeliest is found to the bit"


@pytest.mark.slow
@pytest.mark.parametrize("padded", [26, 40], ids=["some padding", "a rank of nothing but padding"])
def test_halves_of_a_vocabulary_equal_the_whole(padded: int, tmp_path: Path) -> None:
    from tests.learner import test_candidate_logprobs as of_candidates  # it takes its input from here

    run_ranks("tests.learner.token_logprobs_rank", 2, tmp_path, padded)
    for name, expected in (("rank", oracle(0.7, padded)), ("candidates", of_candidates.oracle(0.7, padded))):
        first, second = (load_file(tmp_path / f"{name}_{rank}.safetensors") for rank in range(2))
        split = [key for key in expected if key.startswith("weight")]
        weights = {key: torch.cat([first.pop(key), second.pop(key)]) for key in split}
        of_candidates.assert_equal(first | weights, expected)
        of_candidates.assert_equal(second | weights, expected)


def test_bfloat16_products_are_summed_in_fp32() -> None:
    exact = oracle(1.0)
    hidden, weight, targets, pull = given(dtype=torch.bfloat16)
    logprobs = token_logprobs(hidden, weight, targets, 1.0, logits_per_chunk=VOCABULARY)
    assert logprobs.dtype == torch.float32
    hidden_grad, weight_grad = torch.autograd.grad(logprobs, (hidden, weight), pull.float())
    assert (hidden_grad.dtype, weight_grad.dtype) == (torch.bfloat16, torch.bfloat16)
    got = {"logprobs": logprobs.detach(), "hidden": hidden_grad, "weight": weight_grad}
    found = confident_logprobs(hidden, weight, targets, 1.0)
    got["confidence"] = found[:, 1:].detach()
    got |= gradients_with_entropy(found[:, 0], found[:, 2], hidden, weight, pull.float())
    for name, tensor in exact.items():
        torch.testing.assert_close(got[name].double(), tensor, rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("logprobs", "functions"), [(token_logprobs, 2), (confident_logprobs, 3)])
def test_what_is_compiled_is_compiled_once_and_equal(
    logprobs: Callable[..., torch.Tensor], functions: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of 5 and 3 tokens, then of 8 and 7, use one graph of each function. Graphs run uncompiled."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph

    hidden, weight, targets, pull = given(26, dtype)

    def results(chunk: int) -> tuple[torch.Tensor, ...]:
        given = hidden, weight, targets, 0.7
        found = logprobs(*given, vocabulary=VOCABULARY, logits_per_chunk=chunk * 26)
        pulled = pull.to(found.dtype).view(-1, *[1] * (found.dim() - 1)).expand_as(found)
        return found.detach(), *torch.autograd.grad(found, (hidden, weight), pulled)

    torch._dynamo.reset()
    token_logprobs_module._compiled.cache_clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    for chunk in (5, 8):
        with monkeypatch.context() as patch:
            plain = results(chunk)
            patch.setattr(token_logprobs_module, "COMPILED_ON", frozenset({"cpu"}))
            assert all(torch.equal(got, expected) for got, expected in zip(results(chunk), plain, strict=True))
    assert len(graphs) == functions
    token_logprobs_module._compiled.cache_clear()


def test_no_tensor_of_all_logits_ever_exists() -> None:
    hidden, weight, targets, _ = given()
    largest = LargestTensor()
    with largest:
        token_logprobs(hidden, weight, targets, 1.0, logits_per_chunk=4 * VOCABULARY).sum().backward()
    assert largest.numel == max(4 * VOCABULARY, TOKENS * WIDTH, VOCABULARY * WIDTH)


@pytest.mark.parametrize(("most", "again"), [(TOKENS * VOCABULARY, 0), (TOKENS * VOCABULARY - 1, 6)])
def test_logits_that_are_few_enough_are_computed_once(monkeypatch: pytest.MonkeyPatch, most: int, again: int) -> None:
    monkeypatch.setattr(token_logprobs_module, "KEPT_LOGITS_ON_CPU", most)
    hidden, weight, targets, _ = given()
    options: dict[str, Any] = {"logits_per_chunk": 4 * VOCABULARY, "keeps": True}
    logprobs = token_logprobs(hidden, weight, targets, 1.0, **options)
    with Products() as products:
        logprobs.sum().backward()
    assert products.of_width(VOCABULARY) == again
    with torch.no_grad():
        assert not open_head(hidden, weight, 1.0, **options).keeps, "no backward pass follows"


GIB = 1 << 30


@pytest.mark.parametrize(
    ("dtype", "gib", "most"),
    [
        (torch.bfloat16, 140, 6 * GIB),
        (torch.float32, 140, 35 * GIB // 8),
        (torch.bfloat16, 95, 3 * GIB),
        (torch.bfloat16, 93, 3 * GIB),
        (torch.bfloat16, 80, 3 * GIB),
        (torch.bfloat16, 48, 3 * GIB),
        (torch.bfloat16, 24, 3 * GIB // 2),
        (torch.float32, 24, 3 * GIB // 4),
    ],
)
def test_a_gpu_keeps_no_more_logits_than_its_memory_has_room_for(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, gib: int, most: int
) -> None:
    rows = 1 << 17
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=gib * GIB))
    weight, fitting, more = (OnGpu(length, dtype) for length in (rows, most // rows, most // rows + 1))
    assert open_head(fitting, weight, 1.0, keeps=True).keeps  # type: ignore[arg-type]
    assert not open_head(more, weight, 1.0, keeps=True).keeps  # type: ignore[arg-type]


class OnGpu:
    """All that is asked of a GPU's matrix before its logits are computed. A fake tensor would do, but in a process that
    has opened Megatron on a CPU, whose shim makes tensors on "cuda" ones on the CPU."""

    is_cuda, requires_grad, device = True, True, torch.device("cuda")

    def __init__(self, length: int, dtype: torch.dtype) -> None:
        self._length, self._dtype = length, dtype

    def __len__(self) -> int:
        return self._length

    def element_size(self) -> int:
        return self._dtype.itemsize


class Products(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the sizes of the products of matrices that were computed while this was entered."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[torch.Size] = []

    def of_width(self, width: int) -> int:
        return sum(size[-1] == width for size in self.sizes)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::mm", "aten::matmul"):
            self.sizes.append(result.shape)
        return result


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the most elements of a tensor that an operation returned while this was entered."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.numel())
        return result
