"""Prompts from JSONL and Parquet files and from the `datasets` library, held in memory. Errors name file and line.

Fields: `prompt` (text or messages), `ground_truth` (or verl's nested `reward_model.ground_truth`),
`data_source` (default: the file's name), `extra_info` (a mapping); whatever else a row has goes there too.
"""

import hashlib
import json
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headway.broker.errors import ConfigError
from headway.broker.user_code.kinds import typed_options
from headway.learner.data.file_reading import check_file, dataset_rows, lines_of, parquet_rows
from headway.learner.data.messages import (
    Content,
    Tags,
    check_sendable,
    read_prompt,
    to_kwargs,
    to_tools,
    under_system,
)

from .base import Item, held_out_places

Row = Mapping[str, Any]
LONGEST_ROW_BYTES = 64_000_000
"""The longest line of a file of prompts that is read."""


class RowFields(msgspec.Struct, frozen=True, kw_only=True):
    """The names of columns, if they differ from the defaults."""

    prompt_field: str = "prompt"
    ground_truth_field: str = "ground_truth"
    tags: Tags = Tags()
    """The names of roles and parts of messages, if they are unusual."""
    skip_rows: tuple[str, ...] = ()
    """The places of rows to pass over, as errors name them, such as `train.jsonl:12`."""


def named_fields(options: Mapping[str, Any]) -> RowFields:
    """Returns the names of columns that a recipe's `prompts.options` give, whatever reads its prompts."""
    given = {name: options[name] for name in RowFields.__struct_fields__ if options.get(name)}
    return typed_options(given, RowFields, "prompts.options")


def read_rows(kind: str, path: str, where: str) -> Iterator[tuple[str, Row]]:
    """Yields (`file:line`, row) for each row of a JSONL or Parquet file. Raises ConfigError."""
    file = Path(path)
    if not os.path.isfile(path):
        raise ConfigError(f"{where}: {path[:200]!r} is no file; give the {kind} file's path.")
    if kind == "parquet":
        return parquet_rows(file, where)
    check_file(file, where)
    return _jsonl(file)


def to_items(rows: Iterable[tuple[str, Row]], fields: RowFields, default_source: str) -> list[Item]:
    """Returns all rows as items, after a check that each can be sent to the broker."""
    items, skipped = [], frozenset(fields.skip_rows)
    hidden, changed = dict[str, list[str]](), dict[str, list[str]]()
    for place, row in rows:
        if place in skipped:
            continue
        items.append(item := _item(row, place, fields, default_source))
        check_sendable(item, place)  # checked here, where the row is known
        for found, names in ((hidden, _hidden(row, fields)), (changed, _changed(item))):
            if names:
                found[place] = names
    _tell(
        hidden,
        "have %s as a column and, with another value, in 'extra_info'; the first is %s. Rewards of either signature get"
        " the value of 'extra_info': rename one of the two if yours reads the column.",
    )
    _tell(
        changed,
        "have a value in %s that is no text, number, list or mapping, such as a date; the first is %s. Rewards get it"
        " as text: write it as they are to read it, if yours does.",
    )
    return items


def _tell(found: Mapping[str, Sequence[str]], what: str) -> None:
    """Log how many rows have such columns, if some have, with the columns and the first row."""
    if found:
        names = sorted({repr(name) for names in found.values() for name in names})
        log.warning(f"%d rows {what}", len(found), ", ".join(names), next(iter(found)))


def _changed(item: Item) -> list[str]:
    """Return the columns that reach rewards with another value than the row's."""
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(item.extra_info))
    # NaN equals itself as text alone
    return [name for name, value in item.extra_info.items() if repr(arrived[name]) != repr(value)]


def _hidden(row: Row, fields: RowFields) -> list[str]:
    """Return the columns of a row that its `extra_info` has with other values."""
    nested = row.get("extra_info")
    if not isinstance(nested, Mapping):
        return []
    own = {fields.prompt_field, "ground_truth", "data_source", "extra_info"}  # rewards get these by themselves
    return [name for name, value in nested.items() if name in row and name not in own and row[name] != value]


def _item(row: Row, place: str, fields: RowFields, default_source: str) -> Item:
    rest = dict(row)
    content = rest.pop(fields.prompt_field, None)
    truth = rest.pop(fields.ground_truth_field, None)
    reward_model = rest.get("reward_model")
    if truth is None and isinstance(reward_model, Mapping):
        truth = reward_model.get("ground_truth")
    if content is None or truth is None:
        option = "prompt_field" if content is None else "ground_truth_field"
        if (name := getattr(fields, option)) in row:
            raise is_null(place, name)
        if truth is None and isinstance(reward_model, Mapping) and "ground_truth" in reward_model:
            raise is_null(place, "reward_model.ground_truth")
        raise ConfigError(
            f"{place}: no {name!r}; the row has {names_of(row)}. If it has another name there, give"
            f" that: prompts.options.{option}=NAME."
        )
    data_source = str(rest.pop("data_source", None) or default_source)
    extra_info = rest.pop("extra_info", None) or {}
    if not isinstance(extra_info, Mapping):
        raise ConfigError(f"{place}: 'extra_info' is no mapping but {_short(extra_info)}.")
    if (name := fields.ground_truth_field) != "ground_truth" and name in row:
        rest[name] = row[name]  # rewards made for TRL ask for the column
    return Item(
        place=place,
        content=under_system(_content(content, place, fields), rest.get("system"), place),
        tools=to_tools(rest.get("tools"), place),
        chat_template_kwargs=to_kwargs(rest.get("chat_template_kwargs"), place),
        ground_truth=_plain(truth, place),
        data_source=data_source,
        extra_info={**rest, **extra_info},
    )


def is_null(place: str, name: str) -> ConfigError:
    """Return the error for a row whose column is there and says nothing."""
    return ConfigError(f"{place}: {name!r} is null. Give it a value, or leave the row out of the file.")


def _plain(truth: Any, place: str) -> Any:
    """Returns the ground truth, which rewards get with the type that it has. Raises ConfigError for one that would
    reach them as another value: a date, a decimal number, NaN."""
    with suppress(OverflowError, TypeError, ValueError, RecursionError):  # check_sendable says what cannot be sent
        if msgspec.msgpack.decode(msgspec.msgpack.encode(truth)) != truth:
            raise ConfigError(
                f"{place}: the ground truth is {_short(truth)}, a {type(truth).__name__} that would not reach"
                " rewards as it is. Give it as text, a number, a truth value, a list or a mapping."
            )
    return truth


def _content(content: Any, place: str, fields: RowFields) -> Content:
    if (isinstance(content, str) and content) or (isinstance(content, list | Mapping) and content):
        return read_prompt(content, place, fields.prompt_field, fields.tags)
    raise ConfigError(
        f"{place}: {fields.prompt_field!r} is neither text nor a list of messages with a role, but {_short(content)}."
    )


def _jsonl(file: Path) -> Iterator[tuple[str, Row]]:
    try:
        for number, line, length in lines_of(file, LONGEST_ROW_BYTES):
            if not line:
                raise ConfigError(
                    f"{file}:{number}: the line has {length:,} bytes, and the longest that is read has"
                    f" {LONGEST_ROW_BYTES:,}. Are all rows in one line? Write one a line."
                )
            if line.strip():
                yield f"{file}:{number}", _json_row(line, f"{file}:{number}")
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}.") from error


def _json_row(line: bytes, place: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place}: this is no JSON{fault_of(error)}.") from error
    except RecursionError:
        raise ConfigError(f"{place}: the row has too many brackets within each other to be read.") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{place}: a row must be an object, not {type(row).__name__}.")
    return row


def fault_of(error: ValueError) -> str:
    """Returns what is wrong with a line that is no JSON. The place of the line is said before: `line 1 column 5` of the
    library would contradict it."""
    if isinstance(error, json.JSONDecodeError):
        return f" from column {error.colno} on: {error.msg[:1].lower()}{error.msg[1:]}"
    return f": {error}"


def names_of(row: Row) -> str:
    """Returns the names of a row's columns for an error."""
    return _short(", ".join(map(str, row)), 200) if row else "nothing"


def _short(value: Any, characters: int = 80) -> str:
    """Returns a value's text, cut short, since a row may hold a book."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= characters else f"{text[:characters]}..."


log = logging.getLogger(__name__)


class FileOptions(RowFields, frozen=True, kw_only=True):
    """Names of columns, and the rows that are held out of training."""

    held_out_path: str = ""
    """A second file of the same kind, to evaluate on."""
    held_out_rows: Annotated[int, Meta(ge=0, le=2**53)] = 0
    """The number of rows of the first file to evaluate on instead."""
    held_out_seed: Annotated[int, Meta(ge=0, le=2**53)] | None = 0
    """The seed that draws these rows, the same ones in every run; null: the last rows of the file."""


class PromptList:
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


class FilePrompts(PromptList):
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


class DatasetOptions(RowFields, frozen=True, kw_only=True):
    """The part of the dataset, and names of columns."""

    name: str | None = None
    """The dataset's configuration, such as `main` of gsm8k."""
    split: str = "train"
    held_out_split: str = ""


def open_dataset(path: str, options: Mapping[str, Any]) -> PromptList:
    """Reads all rows of a split into memory. Raises ConfigError if the library or the dataset is not available."""
    chosen = typed_options(options, DatasetOptions, "prompts.options")
    if not path:
        raise ConfigError("prompts.path: give the dataset's hub id or directory.")
    train = to_items(_rows(path, chosen.name, chosen.split), chosen, path)
    held_out = to_items(_rows(path, chosen.name, chosen.held_out_split), chosen, path) if chosen.held_out_split else []
    return PromptList(
        train, held_out, origin=path, remedy="set prompts.options.held_out_split=test", named_after={path}
    )


def _rows(path: str, name: str | None, split: str) -> Iterator[tuple[str, Row]]:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            "prompts.kind=datasets needs the `datasets` library: pip install 'headway[datasets]', "
            "or export the data to a file and use prompts.kind=jsonl or parquet."
        ) from error
    try:
        rows = datasets.load_dataset(path, name, split=split)
    # The library's own errors derive from these two; an unreachable hub is an OSError.
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"prompts.path: dataset {path!r} (configuration {name}, split {split!r}) cannot be loaded: "
            f"{error}. Is the hub reachable from here? If not, export the data to a file and use "
            "prompts.kind=jsonl or parquet."
        ) from error
    return dataset_rows(rows, path, split, "prompts.path")
