"""Terminals for every test that asks."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .terminals import Terminals


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What all terminals share: matplotlib's list of fonts, which takes long to make and is no concern of ours."""
    return {"MPLCONFIGDIR": str(tmp_path_factory.mktemp("matplotlib"))}


@pytest.fixture
def terminals(tmp_path: Path, machine: dict[str, str]) -> Iterator[Terminals]:
    opened = Terminals(tmp_path, machine)
    yield opened
    opened.close()
