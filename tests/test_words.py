"""One word, one thing: the names in the six rooms."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from benchmarks.shape import ROOMS

ROOT = Path(__file__).parent.parent


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Every module of the rooms: its path and its syntax tree."""
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def test_no_two_public_classes_share_a_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in modules():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path)
    assert not {name: found for name, found in places.items() if len(found) > 1}
