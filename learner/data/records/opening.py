"""All records of a file, a saved data set or a hub, in memory."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar, overload

import msgspec
from msgspec import Meta

from headway.broker.errors import ConfigError
from headway.broker.user_code.kinds import did_you_mean, typed_options
from headway.learner.data.prompts.sendable import check_sendable
from headway.learner.data.texts.messages import Tags, to_kwargs, to_tools, under_system

from .base import Conversation, Row, RowError, Skipped, Trained, columns_of
from .layouts import CALLED, LAYOUTS, Layout, Record, RowReader, is_layout_of, is_prompt_of_rl
from .sources.descriptions import FILE_NAME, describe, described
from .sources.files import PlacedRow, read_file, read_saved
from .sources.hubs import read_hugging_face, read_modelscope

logger = logging.getLogger(__name__)
R = TypeVar("R", bound=Record)
FIRST_ROWS = 100
"""The number of rows whose columns decide about the layout of a file: most of them, since the first may be broken."""


class RecordOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of reading a file. By default all of it is told by its columns, and a broken row is an error."""

    format: str = ""
    """The name of a layout, such as alpaca; empty: the one that fits the columns."""
    columns: dict[str, str] = {}
    """Our name of a column -> the file's, such as {prompt: question}."""
    tags: Tags = Tags()
    """The names of roles and parts of messages, if they are unusual."""
    dataset: str = ""
    """The name of a data set in the `dataset_info.json` of the directory that is the path."""
    trained: Trained | Literal[""] = ""
    """The turns of conversations that are trained; empty: as is usual for the layout."""
    on_bad_row: Literal["refuse", "skip"] = "refuse"
    """A broken row ends the reading with an error, or is counted and left out."""
    longest_row_bytes: Annotated[int, Meta(ge=1, le=1 << 32)] = 8_000_000
    """The longest line that is read."""
    split: str = "train"
    """The split of a data set on a hub, or of a saved one."""
    subset: str | None = None
    """The subset of a data set on a hub, such as `main` of gsm8k."""


class Records(Sequence[R], Generic[R]):
    """All records of one source, and what became of the other rows."""

    def __init__(self, records: list[R], *, layout: str, rows: int, skipped: Skipped) -> None:
        self._records = records
        self.layout = layout
        """The name of the layout that was read."""
        self.rows = rows
        """The number of rows; one row may give several records."""
        self.skipped = skipped

    @overload
    def __getitem__(self, index: int) -> R: ...
    @overload
    def __getitem__(self, index: slice) -> list[R]: ...
    def __getitem__(self, index: int | slice) -> R | list[R]:
        return self._records[index]

    def __len__(self) -> int:
        return len(self._records)


def open_records(kind: type[R], path: str, options: Mapping[str, Any], where: str) -> Records[R]:
    """Returns all records of `kind` (Conversation, Preference or Labelled) at `path`.

    The path is a file, a directory that `datasets` saved, a directory with `dataset_info.json` (and `options.dataset`),
    or `hf:OWNER/NAME` or `modelscope:OWNER/NAME`. `where` is the recipe's section, such as `sft.phases`, whose keys
    `path` and `options` errors name. Raises ConfigError for what cannot be read, for a layout that is not of this kind,
    for the first broken row unless `options.on_bad_row` is `skip`, and where no record is left. Logs what it skips.
    """
    records = read_records(kind, path, options, where)
    if records.skipped.total:
        logger.warning("%s: %d of %d rows are skipped: %s", path, records.skipped.total, records.rows, records.skipped)
    return records


def read_records(kind: type[R], path: str, options: Mapping[str, Any], where: str) -> Records[R]:
    """Does what `open_records` does, and logs nothing."""
    chosen = typed_options(options, RecordOptions, f"{where}.options")
    rows, chosen = _rows(path, chosen, f"{where}.path")
    layout, rows = _layout(kind, path, rows, chosen, where)
    skipped, records, count = Skipped(), [], 0
    for place, row in rows:
        count += 1
        try:
            records += _records(layout, place, row, chosen)
        except RowError as error:
            if chosen.on_bad_row == "refuse":
                raise
            skipped.add(error.reason, str(error))
    if not records:
        remedy = f"All {count:,} rows are broken: {skipped}" if skipped.total else "It has no rows."
        raise ConfigError(f"{where}.path: {path} has no {CALLED[kind]}. {remedy}")
    return Records(records, layout=layout.name, rows=count, skipped=skipped)


def open_rows(path: str, options: RecordOptions, where: str) -> Iterator[PlacedRow]:
    """Yields the rows at `path` as they stand there. `where` is the key that errors name."""
    return _rows(path, options, where)[0]


def _rows(path: str, options: RecordOptions, where: str) -> tuple[Iterator[PlacedRow], RecordOptions]:
    """Returns the rows at `path`, and the options with what a description beside the file adds to them."""
    hub, _, name = path.partition(":")
    if hub == "hf":
        return read_hugging_face(name, options.subset, options.split, where), options
    if hub == "modelscope":
        return read_modelscope(name, options.subset, options.split, where), options
    place = Path(path)
    if not path or not place.exists():
        raise ConfigError(
            f"{where}: {path[:200]!r} is no file or directory. Give a path, or hf:OWNER/NAME or modelscope:OWNER/NAME"
            " for a data set on a hub."
        )
    if (place / "state.json").is_file() or (place / "dataset_dict.json").is_file():
        return read_saved(place, options.split, where), options
    if place.name == FILE_NAME:
        place = place.parent
    if place.is_dir():
        place, options = _described_in(place, options, where)
    elif not options.format and not options.columns and (found := described(place, where)):
        options = msgspec.structs.replace(options, format=found.layout, columns=found.columns, tags=found.tags)
    return read_file(place, options.longest_row_bytes, where), options


def _described_in(directory: Path, options: RecordOptions, where: str) -> tuple[Path, RecordOptions]:
    if not (directory / FILE_NAME).is_file():
        raise ConfigError(
            f"{where}: {directory} is a directory without state.json (of a saved data set) or {FILE_NAME}. Give one of"
            f" its files: {', '.join(sorted(file.name for file in directory.iterdir())[:10]) or 'it is empty'}."
        )
    found = describe(directory, options.dataset, where)
    return found.file, msgspec.structs.replace(options, format=found.layout, columns=found.columns, tags=found.tags)


def _layout(
    kind: type[Any], path: str, rows: Iterator[PlacedRow], options: RecordOptions, where: str
) -> tuple[Layout, Iterator[PlacedRow]]:
    """Returns the layout that is named, or that fits most of the first rows; and all rows."""
    layouts = {layout.name: layout for layout in LAYOUTS[kind]}
    if options.format:
        return _named(options.format, kind, layouts, where), rows
    first = list(islice(rows, FIRST_ROWS))
    readable = [_renamed(row, options.columns) for _, row in first if not isinstance(row, RowError)]
    fits = Counter(
        next((each.name for each in layouts.values() if is_layout_of(each, kind, row)), "") for row in readable
    )
    del fits[""]
    if not fits and readable:
        raise _unknown(kind, path, readable[0], where)
    name = fits.most_common(1)[0][0] if fits else next(iter(layouts))
    return layouts[name], chain(first, rows)


def _named(name: str, kind: type[Any], layouts: Mapping[str, Layout], where: str) -> Layout:
    if name not in layouts:
        of = next((CALLED[other] for other in LAYOUTS if name in [each.name for each in LAYOUTS[other]]), "")
        fault = f"holds {of}" if of else f"does not exist{did_you_mean(name, layouts)}"
        raise ConfigError(f"{where}: the layout {name!r} {fault}. Layouts of {CALLED[kind]}: {', '.join(layouts)}.")
    return layouts[name]


def _unknown(kind: type[Any], path: str, row: Row, where: str) -> ConfigError:
    """Returns the error for a file without the columns of a kind; it says what the file looks like instead."""
    known = "; ".join(f"{layout.name} ({', '.join(layout.needs)})" for layout in LAYOUTS[kind])
    others = [CALLED[other] for other in LAYOUTS if any(is_layout_of(each, other, row) for each in LAYOUTS[other])]
    if is_prompt_of_rl(row):
        others = ["prompts of reinforcement learning, which `prompts.path` takes"]
    hint = f" It looks like {' or '.join(others)}." if others else ""
    return ConfigError(
        f"{where}.path: {path} has no {CALLED[kind]}: its columns are {columns_of(row)}.{hint} Expected one"
        f" of: {known}. Where columns have other names, set {where}.options.columns, such as {{prompt: question}}."
    )


def _records(layout: Layout, place: str, row: Row | RowError, options: RecordOptions) -> list[Any]:
    if isinstance(row, RowError):
        raise row
    row = _renamed(row, options.columns)
    _refuse_media(row, place)
    if lacking := layout.lacks(row):
        raise RowError(
            place,
            f"without {' and '.join(map(repr, lacking))}",
            f"there is no {' and no '.join(map(repr, lacking))}; the row has {columns_of(row)}",
            f"All rows of this file are read as {layout.name}. Add the column, or leave the record out.",
        )
    records = [_templated(record, row, place) for record in layout.read(RowReader(row, place, options.tags))]
    for record in records:
        _check_text(record, place)
    if options.trained:
        return [_with_trained(record, options.trained) for record in records]
    return records


def _templated(record: Record, row: Row, place: str) -> Record:
    """Returns the record with the columns of its row that every layout may have: `system`, `tools`, and
    `chat_template_kwargs`."""
    tools, kwargs = to_tools(row.get("tools"), place), to_kwargs(row.get("chat_template_kwargs"), place)
    prompt = under_system(record.prompt, row.get("system"), place)
    changed: dict[str, Any] = {"prompt": prompt, "tools": tools, "chat_template_kwargs": kwargs}
    if isinstance(prompt, list) and isinstance(record.prompt, str):
        answers = {name: getattr(record, name, None) for name in ("completion", "chosen", "rejected")}
        changed |= {
            name: [{"role": "assistant", "content": text}] for name, text in answers.items() if isinstance(text, str)
        }
    return msgspec.structs.replace(record, **changed)


def _renamed(row: Row, columns: Mapping[str, str]) -> Row:
    renamed = {ours: row[theirs] for ours, theirs in columns.items() if theirs in row}
    return {name: value for name, value in row.items() if name not in columns.values()} | renamed


def _refuse_media(row: Row, place: str) -> None:
    for name in ("images", "image", "videos", "audios"):
        if row.get(name):
            raise RowError(
                place, f"with {name}", f"it has {name}", "Headway trains on text alone; leave the record out."
            )


def _check_text(record: Record, place: str) -> None:
    try:
        check_sendable(record, place)
    except ConfigError as error:
        fault = str(error).removeprefix(f"{place}: ").rstrip(".")
        raise RowError(place, "with what is no text in UTF-8", fault, "See there.") from error


def _with_trained(record: Record, trained: Trained) -> Record:
    return msgspec.structs.replace(record, trained=trained) if isinstance(record, Conversation) else record
