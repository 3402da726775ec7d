"""Numbered prompts, for agents that make their tasks themselves, such as games that draw a world. Endless."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headway.broker.user_code.kinds import typed_options

from .base import HELD_OUT_ONE_IN, Item


class NumberedOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The text of a prompt."""

    text: Annotated[str, Meta(min_length=1)] = "Task {number}"
    """`{number}` in it stands for the number."""


class NumberedPrompts:
    """A source with one number for every position, which is the ground truth. Multiples of 16 are held out."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._text = typed_options(options, NumberedOptions, "prompts.options").text

    @property
    def size(self) -> None:
        return None

    def train(self, epoch: int, position: int) -> Item:
        rounds, place = divmod(position, HELD_OUT_ONE_IN - 1)
        return self._item(rounds * HELD_OUT_ONE_IN + place + 1)

    def held_out(self, count: int) -> list[Item]:
        return [self._item(place * HELD_OUT_ONE_IN) for place in range(count)]

    def _item(self, number: int) -> Item:
        return Item(content=self._text.replace("{number}", str(number)), ground_truth=number, data_source="numbered")
