"""The chat formats of the tests, opened once."""

from collections.abc import Callable

import pytest

from .chat_models import Opened, opened_in


@pytest.fixture(scope="session")
def of_kind(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Opened]:
    """Return a function that opens each kind once."""
    made: dict[str, Opened] = {}

    def opened(kind: str) -> Opened:
        if kind not in made:
            made[kind] = opened_in(tmp_path_factory.mktemp(kind), kind)
        return made[kind]

    return opened
