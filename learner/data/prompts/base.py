"""The seam between the learner and the sources of tasks."""

import random
import zlib
from typing import Any, Protocol

import msgspec

from headway.learner.data.messages import Message

__all__ = ["Item", "Message", "PromptSource", "is_held_out"]

HELD_OUT_ONE_IN = 16


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One task as its source states it, before tokenization."""

    content: str | list[Message]
    """A text that the model continues, or a conversation that it answers, in any dialect that records may have. Where
    its last message is an assistant's, the model goes on with that."""
    tools: list[dict[str, Any]] = []
    """Descriptions of functions, as chat templates take them."""
    chat_template_kwargs: dict[str, Any] = {}
    """Values of further names that the chat template reads, such as `enable_thinking`."""
    ground_truth: Any
    """The right answer, as reward functions read it: text, a number, a truth value, a list or a mapping."""
    data_source: str
    """The data set that it comes from, for reward functions that judge several."""
    extra_info: dict[str, Any] = {}
    """Further facts for reward functions, of types that JSON has."""
    place: str = ""
    """The place from which it was read, such as `train.jsonl:12`, for errors."""


class PromptSource(Protocol):
    """Tasks at random access. Equal arguments give equal items, in every process."""

    @property
    def size(self) -> int | None:
        """The number of items in an epoch; None for an endless source, which has one epoch and any position."""
        ...

    def train(self, epoch: int, position: int) -> Item:
        """Returns the training item at 0 <= position < size, never one that `held_out` returns."""
        ...

    def held_out(self, count: int) -> list[Item]:
        """Returns `count` items to evaluate on, the same for every seed, or fewer if there are fewer."""
        ...


def held_out_places(rows: int, count: int, seed: int | None) -> list[int]:
    """Returns the places of `count` rows to hold out of so many, in a drawn order, or all of fewer; with `seed` None
    those of the last rows. Every process gives the same answer."""
    if seed is None:
        return list(range(max(rows - count, 0), rows))
    return random.Random(f"held-out:{seed}").sample(range(rows), min(count, rows))


def is_held_out(text: str) -> bool:
    """Returns whether a generated text is for evaluation, as one in 16 is; every process gives the same answer."""
    return zlib.crc32(text.encode()) % HELD_OUT_ONE_IN == 0
