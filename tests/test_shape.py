"""`make shape` counts what it says, over sources that it never imports."""

from pathlib import Path

import pytest

from benchmarks.shape import ROOMS, measure, percentiles

SOURCES = {
    "broker/keys.py": "from learner.data import reader\n",
    "broker/schema.py": "raise RuntimeError('imported')\n",
    "learner/train.py": "from broker import schema\nfrom .data.reader import read\n",
    "learner/data/__init__.py": "",
    "learner/data/reader.py": "from ..other import x\nimport broker.keys\n\n\ndef read():\n    a = 1\n    return a\n",
    "learner/other.py": "def one(): ...\n",
    "deploy/main.py": "import learner.train\nfrom broker.keys import x\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small Headway; `learner` and `learner.data` import each other, as a folder and its parent may."""
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
