"""Reads the source of the module that an import path names, without running any of it.

So a misspelt name is told before a run starts anything. Loading a model until then may take minutes.
"""

import ast
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from difflib import get_close_matches
from importlib.machinery import PathFinder
from pathlib import Path

from headway.broker.errors import ConfigError

from .roots import cannot_import, has_no_such_name, import_directory, import_path_parts

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
DYNAMIC = {
    *("*", "__getattr__", "__dict__", "__globals__", "f_globals", "f_locals"),
    *("globals", "locals", "vars", "exec", "eval", "setattr", "modules"),
}
"""Names by which a module may give others a value that its source does not show."""


def definition(path: str, where: str) -> Definition | None:
    """Returns the function or class that `path` names, as its module's source defines it; None where only an import can
    tell. Raises ConfigError where the source shows that an import would fail. `where` is the path's key."""
    module, name = import_path_parts(path, where)
    file = _file_of(module, path, where)
    if file is None:
        return None
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{where}: importing {module!r} raised {type(error).__name__}: {error}.") from error
    except (OSError, RecursionError):
        return None
    names = dict(_names(tree))
    if DYNAMIC & {*names, *_mentioned(tree)}:
        return None
    if name not in names:
        raise has_no_such_name(path, where, names)
    return names[name]


def _file_of(module: str, path: str, where: str) -> Path | None:
    """Returns the module's source file, or None where only an import of it, or of a package above it, can tell."""
    top, *below = module.split(".")
    if top in sys.modules:
        return None
    importlib.invalidate_caches()
    here = import_directory()
    spec = importlib.util.find_spec(top) or PathFinder.find_spec(top, [str(here)])
    if spec is None:
        nearest = get_close_matches(top, [file.stem for file in here.glob("*.py")], n=1)
        hint = f" (did you mean {path.replace(top, nearest[0], 1)!r}?)" if nearest else ""
        raise cannot_import(path, where, f"No module named {top!r}{hint}")
    if not below:
        return Path(spec.origin) if spec.has_location and spec.origin and spec.origin.endswith(".py") else None
    if spec.submodule_search_locations is None:
        hint = f" (write {path.replace('.py:', ':')!r}, without .py)" if below == ["py"] else ""
        raise cannot_import(path, where, f"{top!r} is not a package{hint}")
    for directory in spec.submodule_search_locations:
        inside = Path(directory, *below)
        for file in (inside / "__init__.py", inside.with_name(f"{inside.name}.py")):
            if file.is_file():
                return file
    return None


def _names(tree: ast.Module) -> Iterator[tuple[str, Definition | None]]:
    """Yields the names that the module gives something to, and the definitions that stand outside of any condition."""
    for statement in tree.body:
        if isinstance(statement, Definition):
            yield statement.name, statement
            continue
        for node in ast.walk(statement):
            match node:
                case ast.Name(id=name, ctx=ast.Store()) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    yield name, None
                case ast.AsyncFunctionDef(name=name) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                    yield name, None
                case ast.alias(name=name, asname=asname):
                    yield asname or name.partition(".")[0], None
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield from ((name, None) for name in node.names)


def _mentioned(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr="eval"):  # a model's
                continue
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name):
                yield name
