"""Terminals for every test that asks, and one learner's run on fixed batches, with which tests compare others."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.broker.server.embedded import EmbeddedServer

from .fixed_batches import STEPS, final_checkpoint, scripted_worker, start_learner
from .terminals import Terminals


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment of all terminals: they share matplotlib's list of fonts, which takes long to make."""
    return {"MPLCONFIGDIR": str(tmp_path_factory.mktemp("matplotlib"))}


@pytest.fixture
def terminals(tmp_path: Path, machine: dict[str, str]) -> Iterator[Terminals]:
    opened = Terminals(tmp_path, machine)
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, machine: dict[str, str]) -> Iterator[Path]:
    """Yield the last checkpoint of one learner that trained the fixed batches without a break."""
    root = tmp_path_factory.mktemp("uninterrupted")
    opened = Terminals(root, machine)
    with EmbeddedServer(root / "server") as server, scripted_worker(server.url, opened) as worker:
        learner = start_learner(opened, server.url)
        worker.answer(range(STEPS))
        learner.succeeds()
    yield final_checkpoint(opened, incarnation=1)
    opened.close()
