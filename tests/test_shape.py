"""`make shape` counts what it claims to count, in sources that it never imports, and Headway keeps its shape."""

import ast
from pathlib import Path
from typing import Any

import pytest

from benchmarks.shape import ROOMS, measure, percentiles

from .docs.pages import ROOT, tracked_files

SOURCES = {
    "broker/keys.py": "from learner.data import reader\n",
    "broker/schema.py": "raise RuntimeError('imported')\n",
    "learner/train.py": "from broker import schema\nfrom .data.reader import read\n",
    "learner/data/__init__.py": "",
    "learner/data/reader.py": "from ..other import x\nimport broker.keys\n\n\ndef read():\n    a = 1\n    return a\n",
    "learner/other.py": "def one(): ...\n",
    "deploy/main.py": "import learner.train\nfrom broker.keys import x\n",
}

MOST_FUNCTION_LINES = 67


@pytest.fixture(scope="module")
def headway() -> dict[str, Any]:
    return measure(ROOT)


def test_functions_are_short_and_no_two_folders_import_each_other(headway: dict[str, Any]) -> None:
    assert headway["function_lines"]["max"] <= MOST_FUNCTION_LINES
    assert headway["mutual_folders"] == []


def test_all_code_imports_the_rooms_from_the_one_package() -> None:
    files = [path for path in tracked_files() if path.endswith(".py")]
    nodes = [node for path in files for node in ast.walk(ast.parse((ROOT / path).read_text()))]
    absolute = [node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level and node.module]
    imported = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    assert {name for name in (*absolute, *imported) if name.partition(".")[0] in ROOMS} == set()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Write a small Headway; `learner` and `learner.data` import each other, as a folder and its parent may."""
    texts = {f"{room}/__init__.py": "" for room in ROOMS} | SOURCES
    for name, text in (texts | {"README.md": "two words\n\nand four more\n", "ARCHITECTURE.md": "one\n"}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_it_counts_files_importers_pairs_and_lines(root: Path) -> None:
    found = measure(root)
    assert found["root_files"] == {
        "algorithms": 0,
        "broker": 2,
        "deploy": 1,
        "learner": 2,
        "rollout_workers": 0,
        "weightsync": 0,
    }
    assert found["one_importer"] == ["broker.schema", "learner.other", "learner.train"]
    assert found["mutual_folders"] == [["broker", "learner.data"]]
    assert found["function_lines"] == {"p50": 1, "p90": 3, "max": 3}
    assert found["file_lines"]["max"] == 7
    assert found["longest_document_lines"] == {"ARCHITECTURE.md": 3, "README.md": 13}
    assert found["words"] == {"README.md": 5, "ARCHITECTURE.md": 1}


def test_percentiles_are_sizes_that_occur() -> None:
    assert percentiles(range(1, 11)) == {"p50": 5, "p90": 9, "max": 10}
