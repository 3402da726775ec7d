"""The seam between the learner and whatever knows tasks."""

import zlib
from typing import Any, Protocol

import msgspec

Message = dict[str, Any]
"""`{"role": ..., "content": ...}`, as chat templates take it."""

HELD_OUT_ONE_IN = 16


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One task as its source states it, before tokenization."""

    content: str | list[Message]
    """Text that the model continues, or a conversation that it answers."""
    ground_truth: str
    data_source: str
    extra_info: dict[str, Any] = {}
    """Further facts for reward functions, as JSON holds them."""
    place: str = ""
    """The place from which it was read, such as `train.jsonl:12`, for errors."""


class PromptSource(Protocol):
    """Tasks at random access. Equal arguments give equal items, in every process."""

    @property
    def size(self) -> int | None:
        """Items of one epoch; None: endless, there is one epoch and any position exists."""
        ...

    def train(self, epoch: int, position: int) -> Item:
        """The training item at 0 <= position < size. Never one that `held_out` gives."""
        ...

    def held_out(self, count: int) -> list[Item]:
        """`count` items to evaluate on, the same ones for every seed; fewer if there are not so many."""
        ...


def is_held_out(text: str) -> bool:
    """Splits what can be generated in two: one text in 16 is for evaluation, whichever process generates it."""
    return zlib.crc32(text.encode()) % HELD_OUT_ONE_IN == 0
