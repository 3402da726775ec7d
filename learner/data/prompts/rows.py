"""Rows of data files become items. Errors name the file and the line.

Fields: `prompt` (text or messages), `ground_truth` (or verl's nested `reward_model.ground_truth`),
`data_source` (default: the file's name), `extra_info` (a mapping); whatever else a row has goes there too.
"""

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from headway.broker.errors import ConfigError
from headway.broker.user_code.kinds import typed_options
from headway.learner.data.arrow_rows import parquet_rows
from headway.learner.data.bounded_files import check_file, lines_of
from headway.learner.data.texts.base import Content
from headway.learner.data.texts.messages import Tags, read_prompt, to_kwargs, to_tools, under_system

from .base import Item
from .sendable import check_sendable

Row = Mapping[str, Any]
log = logging.getLogger(__name__)
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
