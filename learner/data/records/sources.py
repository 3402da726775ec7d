"""Sources of rows, each row with its place: files of several formats, and data sets on hubs.

A file's first bytes say what it is, whatever its name ends with: JSON lines, a JSON list, Parquet, Arrow (feather, or
the stream that `datasets` writes), plain text with one record a line. A directory is one that `datasets` saved with
`save_to_disk`, or has LLaMA-Factory's `dataset_info.json`, which names the columns and roles of its files. A hub is
`hf:OWNER/NAME` on Hugging Face or `modelscope:OWNER/NAME` on ModelScope.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from headway.broker.errors import ConfigError
from headway.broker.user_code.kinds import did_you_mean
from headway.learner.data.file_reading import check_file, dataset_rows, lines_of, parquet_rows, placed_rows
from headway.learner.data.messages import Tags
from headway.learner.data.prompts.files import fault_of

from .record_types import Row, RowError

PlacedRow = tuple[str, Row | RowError]
"""The place of a row, and the row, or the reason why it cannot be read."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_file(path: Path, longest_row_bytes: int, where: str) -> Iterator[PlacedRow]:
    """Yields each row of a file. Raises ConfigError, which names the key `where`, for what is no such file."""
    try:
        with path.open("rb") as opened:
            start = opened.read(64)
            if not start.strip():
                raise ConfigError(f"{where}: {path} is empty. Give a file with one record a line.")
    except OSError as error:
        raise ConfigError(f"{where}: {path} cannot be read: {error.strerror or error}.") from error
    check_file(path, where)
    if start.startswith(b"PAR1"):
        return parquet_rows(path, where)
    if start.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        return _arrow(path, where)
    if path.suffix in (".parquet", ".arrow", ".feather"):
        raise ConfigError(
            f"{where}: {path} does not begin as a {path.suffix[1:]} file does, but with {start[:8]!r}. Was it written"
            " to the end? If it is JSON, name it .jsonl."
        )
    if start.removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"["):
        return _json_list(path, where)
    return _lines(path, longest_row_bytes)


def read_saved(directory: Path, split: str, where: str) -> Iterator[PlacedRow]:
    """Yields each row of a directory that `datasets` saved: of one dataset, or of the `split` of several."""
    if (directory / "dataset_dict.json").is_file():
        splits = json.loads((directory / "dataset_dict.json").read_text()).get("splits", [])
        if split not in splits:
            raise ConfigError(f"{where}: {directory} has the splits {', '.join(splits)}; set options.split to one.")
        directory = directory / split
    try:
        state = json.loads((directory / "state.json").read_text())
        files = [directory / str(file["filename"]) for file in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{where}: {directory}/state.json cannot be read: {error}. Save the dataset again."
        ) from error
    return (placed for file in files for placed in read_file(file, 0, where))


def _lines(path: Path, longest_row_bytes: int) -> Iterator[PlacedRow]:
    is_text = path.suffix == ".txt"
    for number, line, length in lines_of(path, longest_row_bytes):
        place = f"{path}:{number}"
        if not line:
            yield place, _too_long(length, place, longest_row_bytes)
        line = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
        if line.strip():
            try:
                text = _decoded(line, place)
                yield place, {"text": text.strip()} if is_text else _object(text, place)
            except RowError as error:
                yield place, error


def _too_long(length: int, place: str, longest_row_bytes: int) -> RowError:
    return RowError(
        place,
        "too long to be a record",
        f"the line has {length:,} bytes, and the longest that is read has {longest_row_bytes:,}",
        "Are all records in one line? Write one a line, or raise options.longest_row_bytes.",
    )


def _decoded(line: bytes, place: str) -> str:
    if b"\0" in line:
        raise RowError(
            place,
            "with NUL bytes",
            f"byte {line.index(0) + 1} of the line is NUL, as after a crash while the file was written",
            "Write the file again, or delete the line.",
        )
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise RowError(
            place,
            "not in UTF-8",
            f"byte {error.start + 1} of the line, {line[error.start : error.start + 1]!r}, is no UTF-8",
            "Write the file in UTF-8, such as by `iconv -f LATIN1 -t UTF-8`.",
        ) from None


def _object(text: str, place: str) -> Row:
    try:
        row = json.loads(text)
    except ValueError as error:
        raise RowError(
            place,
            "no JSON",
            f"this is no JSON{fault_of(error)}",
            'Write one object a line, such as {"prompt": "...", "completion": "..."}.',
        ) from None
    except RecursionError:
        raise RowError(
            place, "nested too deep", "the row has too many brackets within each other to be read", "Flatten it."
        ) from None
    return _checked_object(row, place)


def _checked_object(row: Any, place: str) -> Row:
    if not isinstance(row, dict):
        raise RowError(
            place,
            "no object",
            f"a record must be an object, and this is a {type(row).__name__}",
            'Write {"column": value, ...}.',
        )
    return row


def _json_list(path: Path, where: str) -> Iterator[PlacedRow]:
    """Yields the objects of a JSON list, each with the line on which it begins."""
    try:
        text = path.read_bytes().removeprefix(BYTE_ORDER_MARK).decode()
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{where}: {path}:{line}: byte {error.object[error.start : error.start + 1]!r} is no UTF-8. Write the file"
            " in UTF-8, such as by `iconv -f LATIN1 -t UTF-8`."
        ) from None
    try:
        yield from _elements(text, path)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{where}: {path}:{error.lineno}: the list is no JSON from column {error.colno} on: {error.msg}. Was it"
            " written to the end?"
        ) from None
    except RecursionError:
        raise ConfigError(f"{where}: {path} has too many brackets within each other to be read. Flatten it.") from None


def _elements(text: str, path: Path) -> Iterator[PlacedRow]:
    decoder = json.JSONDecoder()
    position, counted, line = _next(text, text.index("[") + 1), 0, 1
    while text[position : position + 1] != "]":
        line += text.count("\n", counted, position)
        counted = position
        row, position = decoder.raw_decode(text, position)
        place = f"{path}:{line}"
        try:
            yield place, _checked_object(row, place)
        except RowError as error:
            yield place, error
        position = _next(text, position)
        if text[position : position + 1] == ",":
            position = _next(text, position + 1)
        elif text[position : position + 1] != "]":
            raise json.JSONDecodeError("expected `,` or `]`", text, position)


def _next(text: str, position: int) -> int:
    """Returns the position of the next character that is no white space."""
    while text[position : position + 1].isspace():
        position += 1
    return position


def _arrow(path: Path, where: str) -> Iterator[PlacedRow]:
    import pyarrow

    def batches() -> Iterator[Any]:
        with pyarrow.memory_map(os.fspath(path)) as source:
            if source.read(6) == b"ARROW1":
                file = pyarrow.ipc.open_file(source)
                yield from (file.get_batch(number) for number in range(file.num_record_batches))
            else:
                source.seek(0)
                yield from pyarrow.ipc.open_stream(source)

    return placed_rows(batches(), path, "Arrow", where)


FILE_INSTEAD = "Or export the data to a file, and give its path."


def read_hugging_face(name: str, subset: str | None, split: str, where: str) -> Iterator[PlacedRow]:
    """Yields each row of a dataset on the Hugging Face hub. Raises ConfigError if it cannot be had."""
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{where}: hf:{name} needs the `datasets` package: pip install 'headway[datasets]'. {FILE_INSTEAD}"
        ) from error
    try:
        rows = datasets.load_dataset(name, subset, split=split)
    except (OSError, ValueError) as error:  # the package's own errors derive from these two
        raise _unreachable(f"hf:{name}", subset, split, error, where) from error
    return dataset_rows(rows, f"hf:{name}", split, where)


def read_modelscope(name: str, subset: str | None, split: str, where: str) -> Iterator[PlacedRow]:
    """Yields each row of a dataset on ModelScope. Raises ConfigError if it cannot be had."""
    try:
        from modelscope.msdatasets import MsDataset
    except ImportError as error:
        raise ConfigError(
            f"{where}: modelscope:{name} needs the `modelscope` package: pip install 'modelscope[dataset]'."
            f" {FILE_INSTEAD}"
        ) from error
    try:
        loaded = MsDataset.load(name, subset_name=subset, split=split)
        rows = loaded.to_hf_dataset() if isinstance(loaded, MsDataset) else loaded
    except Exception as error:
        raise _unreachable(f"modelscope:{name}", subset, split, error, where) from error
    return dataset_rows(rows, f"modelscope:{name}", split, where)


def _unreachable(name: str, subset: str | None, split: str, error: Exception, where: str) -> ConfigError:
    return ConfigError(
        f"{where}: {name} (subset {subset}, split {split!r}) cannot be loaded: {' '.join(str(error).split())[:300]}."
        f" Is the name right, and can the hub be reached from here? {FILE_INSTEAD}"
    )


FILE_NAME = "dataset_info.json"
_COLUMNS = {
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output", "history": "history"},
    "sharegpt": {"messages": "conversations"},
}
"""Their name of a column -> ours, which is also the file's where the description names none."""
_SHARED = {"system": "system", "tools": "tools", "chosen": "chosen", "rejected": "rejected", "kto_tag": "kto_tag"}
_MEDIA = ("images", "videos", "audios")


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """A data set's description of its file."""

    file: Path
    layout: str
    columns: dict[str, str]
    """Our name of a column -> the file's."""
    tags: Tags


def read_description(directory: Path, name: str, where: str) -> Description:
    """Returns the description of the data set `name`. Raises ConfigError if there is none, or none of a text file."""
    stated = _stated(directory, where)
    if name not in stated:
        known = ", ".join(list(stated)[:20])
        message = (
            f"has no data set {name!r}{did_you_mean(name, stated) or '.'}" if name else "describes several data sets."
        )
        raise ConfigError(
            f"{where}: {directory / FILE_NAME} {message} Set options.dataset (for `headway data inspect`: --dataset) to"
            f" one of: {known}."
        )
    entry = stated[name]
    if "file_name" not in entry:
        hub = entry.get("hf_hub_url")
        raise ConfigError(
            f"{where}: the data set {name!r} is no file here."
            + (f" Give its id as the path: hf:{hub}." if hub else " Download it, and give the file's path.")
        )
    return _description(directory, name, entry, where)


def find_description(file: Path, where: str) -> Description | None:
    """Returns the description of a file that stands in the `dataset_info.json` beside it; None without one."""
    if not (file.parent / FILE_NAME).is_file() or (file.parent / "state.json").exists():
        return None
    for name, entry in _stated(file.parent, where).items():
        if isinstance(entry, dict) and entry.get("file_name") == file.name:
            return _description(file.parent, name, entry, where)
    return None


def _stated(directory: Path, where: str) -> Mapping[str, Any]:
    try:
        stated = json.loads((directory / FILE_NAME).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: {directory / FILE_NAME} cannot be read: {error}.") from error
    if not isinstance(stated, dict):
        raise ConfigError(f"{where}: {directory / FILE_NAME} is no object with a description for each data set.")
    return stated


def _description(directory: Path, name: str, entry: Mapping[str, Any], where: str) -> Description:
    form = entry.get("formatting", "alpaca")
    form = "sharegpt" if form == "openai" else form
    if form not in _COLUMNS:
        raise ConfigError(
            f"{where}: the data set {name!r} has the formatting {form!r}. Known: alpaca, sharegpt, openai."
        )
    stated = entry.get("columns", {})
    if media := [medium for medium in _MEDIA if stated.get(medium)]:
        raise ConfigError(f"{where}: the data set {name!r} has {' and '.join(media)}. Headway trains on text alone.")
    names = _COLUMNS[form] | _SHARED
    columns = {ours: stated.get(theirs, ours if not stated else "") for theirs, ours in names.items()}
    if form == "alpaca" and stated and not stated.get("response") and not entry.get("ranking"):
        return Description(
            file=directory / entry["file_name"], layout="text", columns={"text": stated["prompt"]}, tags=Tags()
        )
    suffix = "_preference" if entry.get("ranking") else "_labelled" if stated.get("kto_tag") else ""
    try:
        tags = msgspec.convert(entry.get("tags", {}), Tags)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: the tags of the data set {name!r} are wrong: {error}.") from error
    return Description(
        file=directory / entry["file_name"],
        layout=form + suffix,
        columns={ours: theirs for ours, theirs in columns.items() if theirs and ours != theirs},
        tags=tags,
    )
