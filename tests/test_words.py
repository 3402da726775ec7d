"""One name for one thing in the six rooms."""

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

from benchmarks.shape import ROOMS

ROOT = Path(__file__).parent.parent


@cache
def modules() -> list[tuple[str, ast.Module]]:
    """Return every module: its path and its syntax tree."""
    paths = [path for folder in ROOMS for path in sorted((ROOT / folder).rglob("*.py"))]
    return [(str(path.relative_to(ROOT)), ast.parse(path.read_text())) for path in paths]


def test_no_two_public_classes_share_a_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in modules():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path)
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_no_command_hides_the_function_that_does_its_work() -> None:
    hidden = [
        (path, node.name)
        for path, tree in modules()
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(node)
        if isinstance(inner, ast.ImportFrom) and any((name.asname or name.name) == node.name for name in inner.names)
    ]
    assert not hidden
