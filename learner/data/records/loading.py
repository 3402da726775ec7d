"""Loads all records of a stage into memory: those of a file, a saved data set or a hub, or worked chains.

A recipe's source is a file, or `arithmetic`, the worked chains of the demonstration.
"""

import hashlib
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar, overload

import msgspec
from msgspec import Meta

from headway.broker.errors import ConfigError
from headway.broker.user_code.kinds import did_you_mean, typed_options, unknown_kind
from headway.learner.config import RECORDS, RecordsConfig
from headway.learner.data.examples import ArithmeticExampleOptions, work_out, worked_chains
from headway.learner.data.messages import Tags, check_sendable, to_kwargs, to_tools, under_system
from headway.learner.data.prompts.arithmetic import Chain, chain_options, draw_chain

from .layouts import LAYOUTS, RECORD_NAMES, Layout, Record, RowReader, is_layout_of, is_prompt_of_rl
from .record_types import Conversation, LabelledCompletion, Preference, Row, RowError, Skipped, Trained, columns_of
from .sources import (
    FILE_NAME,
    PlacedRow,
    find_description,
    read_description,
    read_file,
    read_hugging_face,
    read_modelscope,
    read_saved,
)

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
    """Returns all records of `kind` (Conversation, Preference or LabelledCompletion) at `path`.

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
        raise ConfigError(f"{where}.path: {path} has no {RECORD_NAMES[kind]}. {remedy}")
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
    elif not options.format and not options.columns and (found := find_description(place, where)):
        options = msgspec.structs.replace(options, format=found.layout, columns=found.columns, tags=found.tags)
    return read_file(place, options.longest_row_bytes, where), options


def _described_in(directory: Path, options: RecordOptions, where: str) -> tuple[Path, RecordOptions]:
    if not (directory / FILE_NAME).is_file():
        raise ConfigError(
            f"{where}: {directory} is a directory without state.json (of a saved data set) or {FILE_NAME}. Give one of"
            f" its files: {', '.join(sorted(file.name for file in directory.iterdir())[:10]) or 'it is empty'}."
        )
    found = read_description(directory, options.dataset, where)
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
        of = next((RECORD_NAMES[other] for other in LAYOUTS if name in [each.name for each in LAYOUTS[other]]), "")
        fault = f"holds {of}" if of else f"does not exist{did_you_mean(name, layouts)}"
        raise ConfigError(
            f"{where}: the layout {name!r} {fault}. Layouts of {RECORD_NAMES[kind]}: {', '.join(layouts)}."
        )
    return layouts[name]


def _unknown(kind: type[Any], path: str, row: Row, where: str) -> ConfigError:
    """Returns the error for a file without the columns of a kind; it says what the file looks like instead."""
    known = "; ".join(f"{layout.name} ({', '.join(layout.needs)})" for layout in LAYOUTS[kind])
    others = [
        RECORD_NAMES[other] for other in LAYOUTS if any(is_layout_of(each, other, row) for each in LAYOUTS[other])
    ]
    if is_prompt_of_rl(row):
        others = ["prompts of reinforcement learning, which `prompts.path` takes"]
    hint = f" It looks like {' or '.join(others)}." if others else ""
    return ConfigError(
        f"{where}.path: {path} has no {RECORD_NAMES[kind]}: its columns are {columns_of(row)}.{hint} Expected one"
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


class ArithmeticRecordOptions(ArithmeticExampleOptions, frozen=True, kw_only=True):
    """The chains, how carelessly they are worked out, and how many there are."""

    records: Annotated[int, Meta(ge=1, le=1 << 24)] = 4096
    split: Literal["train", "held_out"] = "train"
    """held_out: the chains are among those on which runs evaluate, which no training record has."""


class ArithmeticPairOptions(ArithmeticRecordOptions, frozen=True, kw_only=True):
    """The chains, and how careless the rejected responses are."""

    error_rate: Annotated[float, Meta(ge=0, le=1)] = 0.2
    skip_rate: Annotated[float, Meta(ge=0, le=1)] = 0.4


def open_conversations(config: RecordsConfig, seed: int, where: str) -> Sequence[Conversation]:
    """Returns the conversations of a source. Raises ConfigError. `where` is its key in the recipe."""
    return _opened(Conversation, config, where, lambda options, key: arithmetic_conversations(options, seed, key))


def open_pairs(config: RecordsConfig, seed: int, where: str) -> Sequence[Preference]:
    """Returns the pairs of a source. Raises ConfigError. `where` is its key in the recipe."""
    return _opened(Preference, config, where, lambda options, key: arithmetic_pairs(options, seed, key))


def open_labelled(config: RecordsConfig, seed: int, where: str) -> Sequence[LabelledCompletion]:
    """Returns the responses of a source with their judgements. Raises ConfigError. `where` is its key in the recipe."""
    return _opened(LabelledCompletion, config, where, lambda options, key: arithmetic_labelled(options, seed, key))


def arithmetic_conversations(options: Mapping[str, Any], seed: int, where: str) -> list[Conversation]:
    """Returns chains of a split with their work. Raises ConfigError."""
    chosen = chain_options(options, ArithmeticRecordOptions, where)
    examples = islice(worked_chains(chosen, seed, held_out=chosen.split == "held_out"), chosen.records)
    return [Conversation(prompt=example.query, completion=example.response) for example in examples]


def arithmetic_pairs(options: Mapping[str, Any], seed: int, where: str) -> list[Preference]:
    """Returns pairs of a right response with its work and a careless one with a wrong answer, to chains of a split.
    Raises ConfigError."""
    chosen = chain_options(options, ArithmeticPairOptions, where)
    if not (chosen.error_rate or chosen.skip_rate):
        raise ConfigError(f"{where}: careless responses need an error_rate or a skip_rate above 0.")
    rng = random.Random(f"arithmetic-pairs:{seed}")
    held_out = chosen.split == "held_out"
    return [_pair(draw_chain(rng, chosen, held_out=held_out), rng, chosen) for _ in range(chosen.records)]


def arithmetic_labelled(options: Mapping[str, Any], seed: int, where: str) -> list[LabelledCompletion]:
    """Returns right and careless responses of `arithmetic_pairs`, each to a chain of its own. Raises ConfigError."""
    return [
        LabelledCompletion(
            prompt=pair.prompt, completion=pair.rejected if number % 2 else pair.chosen, label=not number % 2
        )
        for number, pair in enumerate(arithmetic_pairs(options, seed, where))
    ]


def digest_of(*sources: RecordsConfig | None) -> bytes:
    """Returns a digest of the sources' files and their names; it knows nothing of data sets on hubs."""
    digest = hashlib.blake2b(digest_size=16)
    for source in sources:
        path = Path(source.path if source is not None else "")
        files = sorted(path.rglob("*")) if path.is_dir() and path.name else [path]
        for file in files:
            if file.is_file():
                digest.update(f"{file.relative_to(path)}:{file.stat().st_size}:".encode())
                with file.open("rb") as opened:
                    digest.update(hashlib.file_digest(opened, "blake2b").digest())
    return digest.digest()


def _opened(
    kind: type[R], config: RecordsConfig, where: str, chains: Callable[[Mapping[str, Any], str], Sequence[R]]
) -> Sequence[R]:
    match config.kind:
        case "file":
            return open_records(kind, config.path, config.options, where)
        case "arithmetic":
            return chains(config.options, f"{where}.options")
        case unknown:
            raise unknown_kind(unknown, RECORDS, f"{where}.kind")


def _pair(chain: Chain, rng: random.Random, options: ArithmeticPairOptions) -> Preference:
    careful = ArithmeticExampleOptions(min_operations=options.min_operations, max_operations=options.max_operations)
    rejected = work_out(chain, rng, options)
    while rejected.endswith(f"#{chain.answer}"):
        rejected = work_out(chain, rng, options)
    return Preference(prompt=chain.text, chosen=work_out(chain, rng, careful), rejected=rejected)
