"""One word for one thing: the names in the six rooms, and the words of all docstrings and pages."""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

from benchmarks.shape import ROOMS

from .docs.pages import markdown_pages

ROOT = Path(__file__).parent.parent
DOCUMENTED = (*ROOMS, "benchmarks", "docs", "tests")
NO_SENTENCE = re.compile(r"(Of|That|What|How|Which|Where|Who)\b")
"""Words with which no docstring begins: it has a subject and a verb, or names its thing."""
NO_ACTOR = re.compile(r"\b(whoever|nobody|somebody|anybody)\b", re.IGNORECASE)
"""Words in place of worker, learner, caller, reader."""
CODE = re.compile(r"^```.*?^```|`[^`]*`|\]\([^)]*\)|\[[^\]]*\]", re.MULTILINE | re.DOTALL)


@cache
def modules(folders: tuple[str, ...] = ROOMS) -> list[tuple[str, ast.Module]]:
    """Return every module of the folders: its path and its syntax tree."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
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


def docstrings() -> list[tuple[str, str]]:
    """Return every docstring, those of attributes among them, with its place."""
    return [
        (f"{path}:{node.lineno}", node.value.value)
        for path, tree in modules(DOCUMENTED)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]


def test_a_docstring_has_a_subject_and_names_its_actor() -> None:
    found = docstrings()
    assert len(found) > 1000
    assert not [place for place, text in found if NO_SENTENCE.match(text.strip()) or NO_ACTOR.search(text)]


def test_a_page_names_its_actors() -> None:
    assert not {
        str(page.relative_to(ROOT)): words
        for page in markdown_pages()
        if (words := NO_ACTOR.findall(CODE.sub("", page.read_text())))
    }
