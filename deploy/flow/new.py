"""`headway new flow DIR`: writes the example of a user's own flow."""

import os
import shutil
import tempfile
from pathlib import Path

from headway.broker.errors import ConfigError

EXAMPLE = Path(__file__).parent / "example"
LEFT_OUT = shutil.ignore_patterns("__pycache__", ".*")


def example_files() -> tuple[str, ...]:
    """Return the files of the example, below its directory, in the order in which a reader meets them."""
    order = ("recipe", "prompts", "rewards", "environment", "objective", "stage", "sink", "__init__", "test_my_flow")
    paths = [path for pattern in ("*.yaml", "*.py", "my_flow/*.py") for path in EXAMPLE.glob(pattern)]
    return tuple(str(path.relative_to(EXAMPLE)) for path in sorted(paths, key=lambda path: order.index(path.stem)))


def write_flow(directory: Path) -> tuple[str, ...]:
    """Write the example as `directory`, whole or not at all, and return its files. Raises ConfigError where the
    directory exists or cannot be made."""
    if directory.exists() or directory.is_symlink():
        raise ConfigError(f"{directory} exists already. Name a directory that does not.")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as beside:
            shutil.copytree(EXAMPLE, Path(beside, "flow"), ignore=LEFT_OUT)
            os.rename(Path(beside, "flow"), directory)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be made: {error.strerror or error}.") from error
    return example_files()
