"""Prompts from JSONL and Parquet files, held in memory."""

import hashlib
import logging
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headway.broker.errors import ConfigError
from headway.broker.user_code.kinds import typed_options

from .base import Item, held_out_places
from .rows import RowFields, read_rows, to_items

log = logging.getLogger(__name__)


class FileOptions(RowFields, frozen=True, kw_only=True):
    """Names of columns, and the rows that are held out of training."""

    held_out_path: str = ""
    """A second file of the same kind, to evaluate on."""
    held_out_rows: Annotated[int, Meta(ge=0, le=2**53)] = 0
    """The number of rows of the first file to evaluate on instead."""
    held_out_seed: Annotated[int, Meta(ge=0, le=2**53)] | None = 0
    """The seed that draws these rows, the same ones in every run; null: the last rows of the file."""


class ListedPrompts:
    """A source over lists of items. Training items that equal a held-out one in all that their rows say are left
    out; `named_after` are the data sources of rows that say none."""

    def __init__(
        self,
        items: Sequence[Item],
        held_out: Sequence[Item],
        *,
        origin: str,
        remedy: str,
        named_after: Collection[str] = (),
    ) -> None:
        kept_out = {_row_of(item, named_after) for item in held_out}
        self._items = [item for item in items if _row_of(item, named_after) not in kept_out]
        self._held_out = list(held_out)
        _tell_of_prompts_in_both(self._items, held_out, origin)
        self._named_after = named_after
        self._origin = origin
        self._remedy = remedy
        if not self._items:
            raise ConfigError(f"prompts.path: {origin} has no prompts to train on{_where_they_went(items, held_out)}.")

    @property
    def size(self) -> int:
        return len(self._items)

    @property
    def items(self) -> list[Item]:
        """All items, those that are held out at the end."""
        return [*self._items, *self._held_out]

    @cached_property
    def digest(self) -> str:
        """The digest of all that the trained rows say, in their order: 32 hexadecimal digits."""
        digest = hashlib.blake2b(digest_size=16)
        for item in self._items:
            row = _row_of(item, self._named_after)
            digest.update(len(row).to_bytes(8, "little") + row)
        return digest.hexdigest()

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
    """A source over a file, with some of its rows or another file held out."""

    def __init__(self, kind: str, path: str, options: Mapping[str, Any]) -> None:
        chosen = typed_options(options, FileOptions, "prompts.options")
        items = _read(kind, path, chosen, "prompts.path")
        places = held_out_places(len(items), chosen.held_out_rows, chosen.held_out_seed)
        held_out = [items[place] for place in places]
        trained = set(range(len(items))).difference(places)
        if chosen.held_out_path:
            held_out += _read(kind, chosen.held_out_path, chosen, "prompts.options.held_out_path")
        super().__init__(
            [items[place] for place in sorted(trained)],
            held_out,
            origin=path,
            remedy="set prompts.options.held_out_path=FILE or prompts.options.held_out_rows=N",
            named_after={Path(path).stem, Path(chosen.held_out_path).stem},
        )


def _where_they_went(items: Sequence[Item], held_out: Sequence[Item]) -> str:
    """Returns what the error for a source without prompts says of its rows."""
    if not held_out:
        return ""
    repeated = f", or equal one that is ({len(items)})" if items else ""
    return f": all are held out ({len(held_out)}){repeated}; hold fewer out, or give more different rows"


def _row_of(item: Item, named_after: Collection[str]) -> bytes:
    """Returns all that a row says, wherever it stands and in whatever order its columns are."""
    said = "" if item.data_source in named_after else item.data_source
    return msgspec.msgpack.encode((item.content, item.ground_truth, said, item.extra_info), order="sorted")


def _tell_of_prompts_in_both(items: Sequence[Item], held_out: Sequence[Item], origin: str) -> None:
    """Logs how many trained rows have the prompt of a held-out one, which may differ in what the prompt asks for."""
    prompts = {str(item.content) for item in held_out}
    if count := sum(str(item.content) in prompts for item in items):
        log.warning(
            "%s: %d of %d trained rows have the prompt of a held-out row, and differ from it in other columns.",
            origin,
            count,
            len(items),
        )


def _read(kind: str, path: str, fields: RowFields, where: str) -> list[Item]:
    return to_items(read_rows(kind, path, where), fields, Path(path).stem)
