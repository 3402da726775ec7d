"""Prompt sources as users write them, one that works and several that do not. A process of its own imports this."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from headway.learner.data.examples import Example
from headway.learner.data.prompts.base import Item


class ThreeTasks:
    """A source that works."""

    def __init__(self, path: str, seed: int, answer: str = "yes") -> None:
        self._path = path
        self._items = [Item(content=f"{path}{i}", ground_truth=answer, data_source="own") for i in range(3)]

    @property
    def size(self) -> int:
        return len(self._items)

    def train(self, epoch: int, position: int) -> Item:
        return self._items[position]

    def held_out(self, count: int) -> list[Item]:
        return [Item(content="other", ground_truth="no", data_source="own", extra_info={"a": [1]})][:count]


class HangsAtTwo(ThreeTasks):
    """Hangs as a hub does that gives no answer; it notes each try in the file `path`."""

    def train(self, epoch: int, position: int) -> Item:
        with Path(self._path).open("a") as tries:
            tries.write(f"{position}\n")
        while position == 2:
            time.sleep(1)
        return self._items[position]


class HangsOnce(ThreeTasks):
    """Hangs on the first try of all processes."""

    def train(self, epoch: int, position: int) -> Item:
        if not Path(self._path).exists():
            Path(self._path).touch()
            time.sleep(600)
        return self._items[position]


class Exits(ThreeTasks):
    def train(self, epoch: int, position: int) -> Item:
        sys.exit(0)


class EndsItsProcess(ThreeTasks):
    def train(self, epoch: int, position: int) -> Item:
        os._exit(0)


class WrongItems(ThreeTasks):
    def train(self, epoch: int, position: int) -> Item:
        return Item(content=3, ground_truth="x", data_source="own")  # type: ignore[arg-type]


def examples(path: str, seed: int, words: int) -> Iterator[Example]:
    """Yield as many examples as `words`."""
    for number in range(words):
        yield Example(query=path, response=f"{seed} {number}")


def examples_that_hang(path: str, seed: int) -> Iterator[Example]:
    """Yield sixteen examples, then hang."""
    yield from examples(path, seed, 16)
    time.sleep(600)


class Refuses(ThreeTasks):
    def __init__(self, path: str, seed: int) -> None:
        raise ValueError("there is no data set of that name")


class ExitsWhenOpened(ThreeTasks):
    def __init__(self, path: str, seed: int) -> None:
        os._exit(0)
