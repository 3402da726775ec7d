"""Prompts from the `datasets` library: a hub id, or a local directory that it can load."""

from collections.abc import Iterator, Mapping
from typing import Any

from headway.broker.errors import ConfigError
from headway.broker.user_code.kinds import typed_options
from headway.learner.data.arrow_rows import dataset_rows

from .files import ListedPrompts
from .rows import Row, RowFields, to_items


class DatasetOptions(RowFields, frozen=True, kw_only=True):
    """The part of the dataset, and names of columns."""

    name: str | None = None
    """The dataset's configuration, such as `main` of gsm8k."""
    split: str = "train"
    held_out_split: str = ""


def open_dataset(path: str, options: Mapping[str, Any]) -> ListedPrompts:
    """Reads all rows of a split into memory. Raises ConfigError if the library or the dataset is not available."""
    chosen = typed_options(options, DatasetOptions, "prompts.options")
    if not path:
        raise ConfigError("prompts.path: give the dataset's hub id or directory.")
    train = to_items(_rows(path, chosen.name, chosen.split), chosen, path)
    held_out = to_items(_rows(path, chosen.name, chosen.held_out_split), chosen, path) if chosen.held_out_split else []
    return ListedPrompts(
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
