"""Rows of Arrow's tables: Parquet, Arrow, feather, and data sets of the `datasets` library.

A table has one type for each column. A row whose mapping lacks a key of another row's mapping gets that key there, with
null. Such a null says nothing, so it is left out again: nested mappings are as their rows had them. A null that is a
column's own value, or an item of a list, was written by someone, and stays. Files of JSON have no such types, and keep
each null.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from headway.broker.errors import ConfigError

from .bounded_files import check_parquet, counted


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
