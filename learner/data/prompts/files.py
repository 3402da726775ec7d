"""Prompts from JSONL and Parquet files, held in memory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from broker.errors import ConfigError
from broker.user_code.options import typed_options

from .base import Item
from .rows import RowFields, read_rows, to_items


class FileOptions(RowFields, frozen=True, kw_only=True):
    """Names of columns, and the rows that are held out of training."""

    held_out_path: str = ""
    """A second file of the same kind, to evaluate on."""
    held_out_rows: Annotated[int, Meta(ge=0, le=2**53)] = 0
    """The number of last rows of the first file to evaluate on instead."""


class ListedPrompts:
    """A source over lists of items. Training items that equal a held-out one are left out."""

    def __init__(self, items: Sequence[Item], held_out: Sequence[Item], *, origin: str, remedy: str) -> None:
        kept_out = {str(item.content) for item in held_out}
        self._items = [item for item in items if str(item.content) not in kept_out]
        self._held_out = list(held_out)
        self._origin = origin
        self._remedy = remedy
        if not self._items:
            raise ConfigError(f"prompts.path: {origin} has no prompts to train on{_where_they_went(items, held_out)}.")

    @property
    def size(self) -> int:
        return len(self._items)

    def train(self, epoch: int, position: int) -> Item:
        return self._items[position]

    def held_out(self, count: int) -> list[Item]:
        if not self._held_out:
            raise ConfigError(
                f"held-out prompts are wanted, to measure pass rates, and {self._origin} has none; {self._remedy}, "
                "or evaluation.prompts=0."
            )
        return self._held_out[:count]


class FilePrompts(ListedPrompts):
    """A source over a file, with its last rows or another file held out."""

    def __init__(self, kind: str, path: str, options: Mapping[str, Any]) -> None:
        chosen = typed_options(options, FileOptions, "prompts.options")
        items = _read(kind, path, chosen, "prompts.path")
        split = max(len(items) - chosen.held_out_rows, 0)
        held_out = items[split:]
        if chosen.held_out_path:
            held_out += _read(kind, chosen.held_out_path, chosen, "prompts.options.held_out_path")
        super().__init__(
            items[:split],
            held_out,
            origin=path,
            remedy="set prompts.options.held_out_path=FILE or prompts.options.held_out_rows=N",
        )


def _where_they_went(items: Sequence[Item], held_out: Sequence[Item]) -> str:
    """Returns what the error for a source without prompts says of its rows."""
    if not held_out:
        return ""
    repeated = f", or have the prompt of one that is ({len(items)})" if items else ""
    return f": all are held out ({len(held_out)}){repeated}; hold fewer out, or give more different prompts"


def _read(kind: str, path: str, fields: RowFields, where: str) -> list[Item]:
    return to_items(read_rows(kind, path, where), fields, Path(path).stem)
