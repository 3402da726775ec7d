"""A configuration from the network may import some modules and not others: real modules on a real path."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.broker.errors import ConfigError
from headway.broker.user_code.import_paths import ImportRoots

MINE = """
import subprocess
from functools import partial
from subprocess import Popen
from elsewhere.scores import score as borrowed

def score(solution_str): return 1.0

class Source: pass

bound = partial(Popen, "id")
a_number = 3
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a user's directory with modules of their own, and an environment below it with installed packages."""
    home, installed = tmp_path / "home", tmp_path / "home" / ".venv" / "packages"
    (home / "my_package").mkdir(parents=True)
    (home / "my_package" / "__init__.py").touch()
    (home / "my_package" / "rewards.py").write_text("def score(solution_str): return 1.0\n")
    (home / "mine.py").write_text(MINE)
    (home / "broken.py").write_text("import sys\nsys.exit(0)\n")
    (home / "wrong.py").write_text("def\n")
    (installed / "elsewhere").mkdir(parents=True)
    (installed / "elsewhere" / "__init__.py").touch()
    (installed / "elsewhere" / "scores.py").write_text("def score(solution_str): return 2.0\n")
    for path in (home, installed):
        monkeypatch.syspath_prepend(path)
    before = set(sys.modules)
    yield home
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in {"mine", "my_package", "elsewhere", "broken", "wrong"}:
            del sys.modules[name]


@pytest.mark.parametrize("path", ["mine:score", "mine:Source", "my_package.rewards:score"])
def test_what_lies_in_the_directory_is_imported(directory: Path, path: str) -> None:
    assert ImportRoots(directory=directory).load(path, "rewards.kind").__name__ == path.partition(":")[2]


def test_headways_own_modules_are_imported_from_anywhere(tmp_path: Path) -> None:
    ImportRoots(directory=tmp_path).load(
        "headway.rollout_workers.engines.embedded.embedded_engine:open_embedded", "engine.kind"
    )


@pytest.mark.parametrize(
    "path",
    [
        "subprocess:Popen",
        "os:system",
        "builtins:exec",
        "importlib:import_module",
        "multiprocessing.util:spawnv_passfds",
    ],
)
def test_the_standard_library_is_never_imported(directory: Path, path: str) -> None:
    for named in ((), (path.partition(":")[0],), (path,)):
        with pytest.raises(ConfigError, match="belongs to Python's standard library, which no configuration may call"):
            ImportRoots(named, directory).load(path, "rewards.kind")


@pytest.mark.parametrize("path", ["elsewhere.scores:score", "torch.hub:load", "numpy:load", "pytest:main"])
def test_an_installed_package_is_not_imported_unless_it_is_named(directory: Path, path: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"start the workers with --allow-import {path.partition('.')[0].split(':')[0]}"
    ):
        ImportRoots(directory=directory).load(path, "rewards.kind")
    assert "elsewhere" not in sys.modules


@pytest.mark.parametrize("named", ["elsewhere", "elsewhere.scores", "elsewhere.scores:score"])
def test_what_is_named_is_imported(directory: Path, named: str) -> None:
    assert ImportRoots((named,), directory).load("elsewhere.scores:score", "rewards.kind")("") == 2.0


def test_a_name_is_no_prefix_of_another_one(directory: Path) -> None:
    with pytest.raises(ConfigError, match="no option of this command allows it"):
        ImportRoots(("else", "elsewhere.scor"), directory).load("elsewhere.scores:score", "rewards.kind")


@pytest.mark.parametrize("name", ["Popen", "borrowed", "bound"])
def test_what_a_module_has_from_elsewhere_is_not_its_own(directory: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="it is only imported there, and defined in"):
        ImportRoots(directory=directory).load(f"mine:{name}", "rewards.kind")
    ImportRoots((f"mine:{name}",), directory).load(f"mine:{name}", "rewards.kind")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("mine:a_number", "is a int, and no function"),
        ("mine:subprocess", "is a module, and no function"),
        ("mine:scor", "has no 'scor' .*did you mean mine:score"),
        ("nowhere:score", "cannot import 'nowhere' for 'nowhere:score'"),
        ("rollout_workers.environments:X", "write headway.rollout_workers.environments:X"),
        ("deploy:X", "write headway.deploy:X"),
        ("broken:score", "importing 'broken' raised SystemExit: 0"),
        ("wrong:score", "importing 'wrong' raised SyntaxError"),
        ("mine:score.__globals__", "is no import path"),
        (".mine:score", "is no import path"),
        ("mine:", "is no import path"),
    ],
)
def test_what_cannot_be_used_says_why(directory: Path, path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^rewards.kind: .*{message}"):
        ImportRoots(directory=directory).load(path, "rewards.kind")
