"""Measures of the code's division into modules and of the documents' lengths, as one JSON object.

    python -m benchmarks.shape [--root DIRECTORY]

`files` and `lines` are those of the six rooms. `names_of_several_files` counts files of one name, without `base.py`,
the name of every seam. `root_files` counts the modules that lie directly in each room. `one_importer` names the modules
that a single module imports. `mutual_folders` names pairs of folders whose modules import each other.
Nothing is imported: DIRECTORY may hold any version of Headway.
"""

import argparse
import ast
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from math import ceil
from pathlib import Path
from typing import Any

ROOMS = ("algorithms", "broker", "deploy", "learner", "rollout_workers", "weightsync")
COUNTED_WORDS = ("README.md", "ARCHITECTURE.md")

Modules = Mapping[str, ast.Module]
"""Modules by dotted name; that of a package's `__init__.py` is the package's."""


def measure(root: Path) -> dict[str, Any]:
    """Return all measures of the version of Headway in `root`. Raises SyntaxError where a module cannot be parsed."""
    files = [path for room in ROOMS for path in sorted((root / room).rglob("*.py"))]
    packages = {_dotted(path.relative_to(root)) for path in files if path.name == "__init__.py"}
    modules = {_dotted(path.relative_to(root)): ast.parse(path.read_text()) for path in files}
    importers = importers_of(modules, packages)
    functions = [_lines(node) for tree in modules.values() for node in ast.walk(tree) if _is_function(node)]
    names = Counter(path.name for path in files if path.name not in {"__init__.py", "base.py"})
    lines = sum(path.read_text().count("\n") for path in files)
    return {
        "files": len(files),
        "lines": lines,
        "benchmark_lines": _lines_below(root / "benchmarks"),
        "test_lines": _lines_below(root / "tests"),
        "markdown_words": sum(len(path.read_text().split()) for path in _documents(root)),
        "names_of_several_files": {name: count for name, count in sorted(names.items()) if count > 1},
        "public_names_per_1000_lines": round(1000 * sum(map(_public_names, modules.values())) / lines, 1),
        "root_files": {room: sum(path.parent == root / room for path in files) - 1 for room in ROOMS},
        "modules": len(modules),
        "one_importer": sorted(name for name, by in importers.items() if len(by) == 1 and name not in packages),
        "mutual_folders": mutual_folders(importers, packages),
        "function_lines": percentiles(functions),
        "file_lines": percentiles([path.read_text().count("\n") for path in files]),
        "longest_document_lines": {str(path.relative_to(root)): _longest_line(path) for path in _documents(root)},
        "words": {name: len((root / name).read_text().split()) for name in COUNTED_WORDS},
    }


def importers_of(modules: Modules, packages: set[str]) -> dict[str, set[str]]:
    """Return, by module, the modules that import it or a name of it."""
    importers: dict[str, set[str]] = defaultdict(set)
    for name, tree in modules.items():
        for candidates in _imports(name, tree, name in packages):
            found = next((each for each in candidates if each in modules), name)
            if found != name:
                importers[found].add(name)
    return importers


def mutual_folders(importers: Mapping[str, set[str]], packages: set[str]) -> list[list[str]]:
    """Return pairs of folders, neither inside the other, each of which imports from the other."""
    arrows = {
        (_folder(importer, packages), _folder(imported, packages))
        for imported, by in importers.items()
        for importer in by
    }
    folders = sorted({folder for arrow in arrows for folder in arrow})
    return [
        [one, other]
        for one, other in combinations(folders, 2)
        if {(one, other), (other, one)} <= arrows and not f"{other}.".startswith(f"{one}.")
    ]


def percentiles(sizes: Sequence[int]) -> dict[str, int]:
    """Return the median, the 90th percentile and the largest of at least one size."""
    ordered = sorted(sizes)
    return {name: ordered[ceil(share * len(ordered)) - 1] for name, share in (("p50", 0.5), ("p90", 0.9), ("max", 1.0))}


def _imports(name: str, tree: ast.Module, is_package: bool) -> Iterator[tuple[str, ...]]:
    """Return, for each imported name, the modules that it may be or come from, the likelier first."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name.removeprefix("headway."),) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = name.split(".")[: len(name.split(".")) - node.level + is_package] if node.level else []
            source = ".".join([*parents, *([node.module] if node.module else [])]).removeprefix("headway.")
            yield from ((f"{source}.{alias.name}", source) for alias in node.names)


def _lines_below(folder: Path) -> int:
    return sum(path.read_text().count("\n") for path in folder.rglob("*.py"))


def _public_names(tree: ast.Module) -> int:
    """Return how many functions and classes of a module others may use."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return sum(isinstance(node, kinds) and not node.name.startswith("_") for node in tree.body)


def _dotted(path: Path) -> str:
    return ".".join(path.parent.parts if path.name == "__init__.py" else path.with_suffix("").parts)


def _folder(module: str, packages: set[str]) -> str:
    return module if module in packages else module.rpartition(".")[0]


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def _lines(node: ast.AST) -> int:
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def _documents(root: Path) -> list[Path]:
    return sorted([*root.glob("*.md"), *root.glob("benchmarks/*.md"), *root.glob("docs/**/*.md")])


def _longest_line(path: Path) -> int:
    return max(map(len, path.read_text().splitlines()), default=0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(), help="where the rooms lie")
    print(json.dumps(measure(parser.parse_args().root), indent=2))
