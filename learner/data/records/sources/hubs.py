"""Rows of datasets on a hub: `hf:OWNER/NAME` on Hugging Face, `modelscope:OWNER/NAME` on ModelScope."""

from collections.abc import Iterator

from headway.broker.errors import ConfigError
from headway.learner.data.arrow_rows import dataset_rows

from .files import PlacedRow

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
