"""Reads lines and tables of data files: no packed ones, and none that would take more than half of the memory.

All rows of a file are held in memory. A small file may unpack to any size, so its own statement is read first, and
where that says too little, the file is measured in small pieces before a row of it is kept.

A table (Parquet, Arrow, feather, a data set of the `datasets` library) has one type for each column. A row whose
mapping lacks a key of another row's mapping gets that key there, with null. Such a null says nothing, so it is left out
again: nested mappings are as their rows had them. A null that is a column's own value, or an item of a list, was
written by someone, and stays. Files of JSON have no such types, and keep each null.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from headway.broker.errors import ConfigError

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile


FOREIGN = {
    b"\x1f\x8b": ("packed by gzip", "Unpack it with `gunzip` first"),
    b"\x28\xb5\x2f\xfd": ("packed by zstd", "Unpack it with `unzstd` first"),
    b"BZh": ("packed by bzip2", "Unpack it with `bunzip2` first"),
    b"\xfd7zXZ": ("packed by xz", "Unpack it with `unxz` first"),
    b"PK\x03\x04": ("a zip archive", "Unpack it with `unzip` first"),
    b"\xff\xfe": ("in UTF-16", "Write it in UTF-8: iconv -f UTF-16 -t UTF-8"),
    b"\xfe\xff": ("in UTF-16", "Write it in UTF-8: iconv -f UTF-16 -t UTF-8"),
    b"<": ("a page of HTML or XML", "Download the file itself, not the page that shows it"),
    b"version https://git-lfs": ("a pointer of Git LFS", "Fetch the file itself with `git lfs pull`"),
}
CGROUP = Path("/sys/fs/cgroup/memory.max")
VALUE_BYTES = 40
"""Bytes of one value of a table as an object of Python: eight of its place in a list, and those of a number."""
MEASURED_ROWS = 16
"""Rows of a piece that is measured: each may be as large as its whole column says to be when packed."""
PIECE = 1 << 16


def most_bytes() -> int:
    """Returns half of the memory that this machine has, or that this container may use."""
    total = psutil.virtual_memory().total
    with suppress(OSError, ValueError):  # no container's, or no limit: "max"
        total = min(total, int(CGROUP.read_text()))
    return total // 2


def check_file(path: Path, where: str) -> None:
    """Raises ConfigError, which names the key `where`, for a file that is packed or larger than half of the memory."""
    try:
        with path.open("rb") as opened:
            start = opened.read(64)
    except OSError as error:
        raise ConfigError(f"{where}: {path} cannot be read: {error.strerror or error}.") from error
    for magic, (what, remedy) in FOREIGN.items():
        if start.startswith(magic):
            raise ConfigError(f"{where}: {path} is {what}. {remedy}.")
    if (size := path.stat().st_size) > most_bytes():
        raise too_large(path, size, where)


def too_large(path: Path | str, size: int, where: str) -> ConfigError:
    """Returns the error for a file, or a data set, whose rows take at least so many bytes."""
    return ConfigError(
        f"{where}: {path} takes at least {size:,} bytes of memory once it is read, and at most {most_bytes():,} are"
        " read, half of what this machine has. Give a part of it, or a machine with more memory."
    )


def check_parquet(opened: "ParquetFile", path: Path, where: str) -> None:
    """Raises ConfigError, before a row is kept, for a file that takes more than half of the memory once it is read."""
    metadata, most = opened.metadata, most_bytes()
    chunks = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    columns = [chunk.column(number) for chunk in chunks for number in range(chunk.num_columns)]
    stated = sum(column.total_uncompressed_size for column in columns)
    size = max(stated, VALUE_BYTES * sum(column.num_values for column in columns))
    if size > most:
        raise too_large(path, size, where)
    # Of a dictionary the file states each text once, however often the text occurs.
    repeated = (column for column in columns if column.has_dictionary_page and column.physical_type == "BYTE_ARRAY")
    if sum(column.num_values * column.total_uncompressed_size for column in repeated) > most:
        for _ in counted(opened.iter_batches(batch_size=MEASURED_ROWS), path, where):
            pass


def counted(batches: Iterable[Any], path: Path | str, where: str) -> Iterator[Any]:
    """Yields record batches. Raises ConfigError once they take more than half of the memory together."""
    total, most = 0, most_bytes()
    for batch in batches:
        total += max(batch.nbytes, VALUE_BYTES * sum(map(_values_in, batch.columns)))
        if total > most:
            raise too_large(path, total, where)
        yield batch


def _values_in(column: Any) -> int:
    """Returns the number of values of a column of Arrow, those of its lists and mappings counted one by one."""
    from pyarrow import types

    kind = column.type
    if types.is_struct(kind):
        return sum(map(_values_in, column.flatten()))
    if types.is_map(kind):
        return _values_in(column.keys) + _values_in(column.items)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _values_in(column.flatten())
    return len(column)


def lines_of(path: Path, longest: int) -> Iterator[tuple[int, bytes, int]]:
    """Yields (number from 1, line, its bytes) of each line of a file. A line of more than `longest` bytes is not kept:
    it comes as b"", with its length."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(longest + 1):
            number, length = number + 1, len(line)
            if length > longest and not line.endswith(b"\n"):
                while (rest := file.readline(PIECE)) and not rest.endswith(b"\n"):
                    length += len(rest)
                length += len(rest)
            yield (number, line, length) if length <= longest + line.endswith(b"\n") else (number, b"", length)


def as_written(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the row without the nulls that a table's type puts into its nested mappings."""
    return {name: _without_nulls(value) for name, value in row.items()}


def placed_rows(batches: Iterable[Any], path: Path, what: str, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the rows of record batches of a file, each with its place, such as `train.parquet: row 3`. Raises
    ConfigError, which names the key `where`, for one that is no `what` file, or damaged."""
    import pyarrow

    number = 0
    try:
        for batch in counted(batches, path, where):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}: row {number}", as_written(row)
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"{where}: {str(path)!r} is no {what} file, or damaged after row {number}:"
            f" {' '.join(str(error).split())[:300]}. Write or download it again."
        ) from error


def parquet_rows(path: Path, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the rows of a Parquet file as `placed_rows` does."""
    from pyarrow import parquet

    def batches() -> Iterator[Any]:
        with parquet.ParquetFile(path) as opened:
            check_parquet(opened, path, where)
            yield from opened.iter_batches()

    return placed_rows(batches(), path, "Parquet", where)


def dataset_rows(rows: Iterable[Any], name: str, split: str, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the rows of a split of the `datasets` library, each with its place, such as `me/sums[train]: row 3`. Its
    table lies in files, and is measured before a row of it is kept. Raises ConfigError, which names the key `where`,
    for one that takes more than half of the memory."""
    if (table := getattr(rows, "data", None)) is not None:
        for _ in counted(table.to_batches(), f"{name}[{split}]", where):
            pass
    return ((f"{name}[{split}]: row {number}", as_written(row)) for number, row in enumerate(rows, start=1))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    if isinstance(value, list | tuple):
        return [_without_nulls(item) for item in value]
    return value
