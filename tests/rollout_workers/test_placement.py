"""Loaders that change tensors as engines do, and a placement that must come to the same bits."""

from collections.abc import Iterable

import pytest
import torch

from headway.broker.errors import WeightSyncError
from headway.rollout_workers.engines.weight_loading.weight_placement import Placement, PublishedTensor, trace

WIDTH, HEADS, EXPERTS, INNER, VOCABULARY = 8, 4, 3, 6, 10


SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (VOCABULARY, WIDTH),
    "norm": (WIDTH,),
    "q": (HEADS * 4, WIDTH),
    "k": (4, WIDTH),
    "v": (4, WIDTH),
    "q_bias": (HEADS * 4,),
    "o": (WIDTH, HEADS * 4),
    "stacked": (EXPERTS, 2 * INNER, WIDTH),
    **{f"gate.{expert}": (INNER, WIDTH) for expert in range(EXPERTS)},
    **{f"up.{expert}": (INNER, WIDTH) for expert in range(EXPERTS)},
    **{f"down.{expert}": (WIDTH, INNER) for expert in range(EXPERTS)},
}


class Shard:
    """One tensor parallel rank of an engine: fused, stacked, padded, and with the halves of its experts swapped."""

    def __init__(self, rank: int, size: int, dtype: torch.dtype) -> None:
        self.rank, self.size = rank, size
        self.parameters = {
            name: torch.zeros(shape, dtype=dtype)
            for name, shape in {
                "embed": (8, WIDTH) if size > 1 else (16, WIDTH),  # padded to 16 rows
                "norm": (WIDTH,),
                "qkv": ((HEADS * 4) // size + 8, WIDTH),  # key and value heads are repeated
                "q_bias": ((HEADS * 4) // size,),
                "o": (WIDTH, HEADS * 4 // size),
                "stacked": (EXPERTS, 2 * INNER // size, WIDTH),
                "w31": (EXPERTS, 2 * INNER // size, WIDTH),
                "down_transposed": (EXPERTS, INNER // size, WIDTH),
            }.items()
        }

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            kind, _, expert = name.partition(".")
            getattr(self, f"_{kind}")(tensor, *([int(expert)] if expert else []))

    def _own(self, tensor: torch.Tensor, dimension: int = 0) -> torch.Tensor:
        return tensor.chunk(self.size, dimension)[self.rank]

    def _embed(self, tensor: torch.Tensor) -> None:
        first = self.rank * len(self.parameters["embed"])
        rows = tensor[first : first + len(self.parameters["embed"])]
        self.parameters["embed"][: len(rows)] = rows

    def _norm(self, tensor: torch.Tensor) -> None:
        self.parameters["norm"].copy_(tensor)

    def _q(self, tensor: torch.Tensor) -> None:
        self.parameters["qkv"][:-8] = self._own(tensor)

    def _k(self, tensor: torch.Tensor) -> None:
        self.parameters["qkv"][-8:-4] = tensor

    def _v(self, tensor: torch.Tensor) -> None:
        self.parameters["qkv"][-4:] = tensor

    def _q_bias(self, tensor: torch.Tensor) -> None:
        self.parameters["q_bias"].copy_(self._own(tensor))

    def _o(self, tensor: torch.Tensor) -> None:
        self.parameters["o"].copy_(self._own(tensor, 1))

    def _stacked(self, tensor: torch.Tensor) -> None:
        gate, up = tensor.chunk(2, 1)
        self.parameters["stacked"].copy_(torch.cat([self._own(gate, 1), self._own(up, 1)], 1))

    def _gate(self, tensor: torch.Tensor, expert: int) -> None:
        self.parameters["w31"].chunk(2, 1)[1][expert] = self._own(tensor)

    def _up(self, tensor: torch.Tensor, expert: int) -> None:
        self.parameters["w31"].chunk(2, 1)[0][expert] = self._own(tensor)

    def _down(self, tensor: torch.Tensor, expert: int) -> None:
        self.parameters["down_transposed"][expert] = self._own(tensor, 1).T


def published(dtype: torch.dtype) -> list[PublishedTensor]:
    return [PublishedTensor(name, shape, dtype) for name, shape in SHAPES.items()]


def version(dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def placed(shard: Shard, placement: Placement, *parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for parameter in shard.parameters.values():
        parameter.zero_()
    for part in parts:
        placement.copies(shard.parameters, part).make()
    return {name: parameter.clone() for name, parameter in shard.parameters.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
def test_it_is_what_the_loader_does(rank: int, size: int, dtype: torch.dtype) -> None:
    shard = Shard(rank, size, dtype)
    placement = trace(shard.load, shard.parameters, published(dtype))
    tensors = version(dtype, seed=1)
    got = placed(shard, placement, tensors)
    fresh = Shard(rank, size, dtype)
    fresh.load(tensors.items())
    assert all(torch.equal(got[name], parameter) for name, parameter in fresh.parameters.items())


def test_tensors_may_come_in_parts_and_lie_anywhere() -> None:
    shard = Shard(0, 1, torch.bfloat16)
    placement = trace(shard.load, shard.parameters, published(torch.bfloat16))
    tensors = version(torch.bfloat16, seed=1)
    whole = placed(shard, placement, tensors)
    bucket = torch.cat([tensors[name].view(-1) for name in ("q", "k", "v")])
    ends = [0, 128, 160, 192]
    views = {
        name: bucket[start:end].view(SHAPES[name])
        for name, start, end in zip(("q", "k", "v"), ends, ends[1:], strict=False)
    }
    others = {name: tensor for name, tensor in tensors.items() if name not in views}
    in_parts = placed(shard, placement, others, views)
    assert all(torch.equal(in_parts[name], whole[name]) for name in whole)


def test_what_lies_together_is_one_copy() -> None:
    shard = Shard(0, 1, torch.bfloat16)
    blocks = trace(shard.load, shard.parameters, published(torch.bfloat16)).blocks
    assert len(blocks) == len(SHAPES)
    assert len([block for block in blocks if block.source == "stacked"]) == 1


def test_more_elements_than_a_number_has_bits() -> None:
    weight = torch.zeros(300, 500, dtype=torch.bfloat16)

    def load(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in tensors:
            weight.copy_(tensor.flip(0))

    (source,) = [PublishedTensor("a", (300, 500), torch.bfloat16)]
    placement = trace(load, {"weight": weight}, [source])
    given = torch.randn(300, 500).bfloat16()
    placement.copies({"weight": weight}, {"a": given}).make()
    assert torch.equal(weight, given.flip(0))


def scaled(weight: torch.Tensor, tensor: torch.Tensor) -> None:
    weight.copy_(tensor.roll(1, 1))


def mixed(weight: torch.Tensor, tensor: torch.Tensor) -> None:
    weight[:, ::2] = tensor[:, ::2]


@pytest.mark.parametrize(
    ("change", "words"),
    [(scaled, "columns of weight do not stand at equal steps"), (mixed, "rows of weight come from")],
)
def test_a_loader_that_does_more_than_copying_is_refused(change, words: str) -> None:  # type: ignore[no-untyped-def]
    weight = torch.zeros(4, 6)

    def load(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in tensors:
            change(weight, tensor)

    with pytest.raises(WeightSyncError, match=words):
        trace(load, {"weight": weight}, [PublishedTensor("a", (4, 6), torch.float32)])


def test_another_number_format_is_the_loaders_work() -> None:
    shard = Shard(0, 1, torch.bfloat16)
    with pytest.raises(WeightSyncError, match="holds bfloat16 and gets float32: its loader must convert"):
        trace(shard.load, shard.parameters, published(torch.float32))
