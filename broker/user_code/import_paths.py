"""A process resolves only import paths below the modules that its operator named.

A worker's configuration lies in the broker. If workers resolved every path in it, a process that can write there could
run `subprocess:Popen` in every worker, or a function that a reward module happens to have imported.

`definition` reads the source of the module that a path names without running it, so that a misspelt name is an error
before a run starts anything: loading a model until then may take minutes.
"""

import ast
import importlib
import importlib.util
import inspect
import os
import re
import site
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from headway.broker.errors import ConfigError, HeadwayError

from .kinds import check_offers, lacks

OWN_PACKAGE = Path(__file__).parents[2]
"""The directory of `headway`, below which every module of Headway's own lies."""
PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
NEVER = sys.stdlib_module_names | set(sys.builtin_module_names) | {"__main__"}


def import_directory() -> Path:
    """The directory of the operator's own modules, in which the command was given."""
    return Path(os.environ.get("HEADWAY_IMPORT_PATH", os.getcwd()))


@dataclass(frozen=True)
class ImportRoots:
    """The modules that may be imported: Headway's own, those in `directory`, and those that the operator has named."""

    named: tuple[str, ...] = ()
    """Modules, with all below them, and whole paths such as `my_rewards:score`."""
    directory: Path = field(default_factory=import_directory)

    def check(self, path: str, where: str) -> None:
        """Raise ConfigError, without importing anything of it, where `path` may not be imported. `where` is its key."""
        module = self._module(path, where)
        if path not in self.named and not self._is_allowed(module):
            allow = (
                "If you trust the author of this configuration, start the workers with --allow-import"
                f" {module.partition('.')[0]}."
            )
            raise ConfigError(
                f"{where}: {path!r} is not imported: {module!r} belongs neither to Headway nor to the files in"
                f" {self.directory}, and no option of this command allows it. {_with_package(path) or allow}"
            )

    def load(self, path: str, where: str) -> Any:
        """Returns the object that `path` names. Raises ConfigError where it may not or cannot be imported, or is
        defined outside the roots: a module of the user's own also contains names that it has imported from
        elsewhere."""
        self.check(path, where)
        found = load(path, where)
        home = getattr(found, "__module__", None) or type(found).__module__
        if path not in self.named and not self._is_allowed(home):
            raise ConfigError(
                f"{where}: {path!r} is not used: it is only imported there, and defined in {home!r}, which nobody has"
                f" allowed here. Start the workers with --allow-import {path}, or wrap it in a function of your own."
            )
        return found

    def _module(self, path: str, where: str) -> str:
        module, _ = import_path_parts(path, where)
        if module.partition(".")[0] in NEVER:
            raise ConfigError(
                f"{where}: {path!r} is not imported: {module!r} belongs to Python's standard library, which no"
                " configuration may call. Wrap it in a function of your own."
            )
        return module

    def _is_allowed(self, module: str) -> bool:
        top = module.partition(".")[0]
        if top in NEVER:
            return False
        if top == OWN_PACKAGE.name or any(f"{module}.".startswith(f"{name}.") for name in self.named):
            return True
        return self._lies_in_directory(top)

    def _lies_in_directory(self, top: str) -> bool:
        """Returns whether the module `top` lies directly in the directory, as an environment with its packages often
        lies below it. A module that does not exist may be looked for."""
        try:
            spec = importlib.util.find_spec(top)
        except ValueError:  # a module without a spec, made at run time
            return False
        if spec is None:
            return True
        places: list[str | None] = [*(spec.submodule_search_locations or ())]
        places = places or [spec.origin if spec.has_location else None]
        here = self.directory.resolve()
        return all(place is not None and Path(place).parent.resolve() == here for place in places)


def load(path: str, where: str) -> Any:
    """Returns the object that `package.module:name` names, for a process whose operator gave it the recipe. Raises
    ConfigError for every error of importing it."""
    module_name, name = import_path_parts(path, where)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise cannot_import(path, where, str(error)) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{where}: importing {module_name!r} raised {type(error).__name__}: {error}{place_of(error)}."
        ) from error
    if not hasattr(module, name):
        raise has_no_such_name(path, where, vars(module))
    if not callable(found := getattr(module, name)):
        raise ConfigError(f"{where}: {path!r} is a {type(found).__name__}, and no function or class.")
    return found


def place_of(error: BaseException) -> str:
    """Returns the file and the line of the user's own at which the error was raised, in brackets; "" if none of it was
    running."""
    libraries = [OWN_PACKAGE, *map(Path, site.getsitepackages()), Path(os.__file__).parent]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.is_file() and not any(file.is_relative_to(library) for library in libraries):
            return f" ({file.name}, line {frame.lineno}, in {frame.name})"
    return ""


def cannot_import(path: str, where: str, reason: str) -> ConfigError:
    """The error for an import path whose module is not found, or lacks something that it imports itself."""
    module = path.partition(":")[0]
    install = (
        "It must be installed, or lie in the directory of the command or on PYTHONPATH, on each machine that needs it."
    )
    return ConfigError(f"{where}: cannot import {module!r} for {path!r}: {reason}. {_with_package(path) or install}")


def _with_package(path: str) -> str:
    """Returns what to write for a path below one of Headway's rooms that lacks the package's name; "" for others."""
    room = path.partition(":")[0].partition(".")[0]
    is_ours = (OWN_PACKAGE / room / "__init__.py").is_file()
    return f"Headway's own modules lie in the package headway: write headway.{path}." if is_ours else ""


def has_no_such_name(path: str, where: str, names: Iterable[str]) -> ConfigError:
    """The error for an import path whose module has these names and not that of the path."""
    module, _, name = path.partition(":")
    nearest = get_close_matches(name, list(names), n=1)
    hint = f"; did you mean {module}:{nearest[0]}?" if nearest else "."
    return ConfigError(f"{where}: module {module!r} has no {name!r} (from {path!r}){hint}")


def import_path_parts(path: str, where: str) -> tuple[str, str]:
    """Returns module and name of an import path. Raises ConfigError for an invalid one."""
    if not PATH.fullmatch(path):
        raise ConfigError(f"{where}: {path!r} is no import path; write package.module:name.")
    module, _, name = path.partition(":")
    return module, name


def load_custom(
    path: str,
    seam: type,
    where: str,
    call: Callable[[Any], Any],
    *,
    roots: ImportRoots | None = None,
    not_asked: Collection[str] = (),
) -> Any:
    """Return the result of `call` on the class or function that `path` names.

    `where` is its key in the recipe. `roots`: below which it may be imported; by default the path itself, of a process
    whose operator gave it the recipe. `not_asked`: what it states that it cannot do.
    Raises ConfigError where `path` may not or cannot be imported, or where what it makes lacks something that the
    protocol `seam` promises; what the class itself raises is passed on.
    """
    own = (roots or ImportRoots((path,))).load(path, where)
    if inspect.isabstract(own):
        raise lacks(own, own.__abstractmethods__, seam, path, where)
    made = call(own)
    check_offers(made, seam, path, where, not_asked=not_asked)
    return made


@contextmanager
def in_one_paragraph(path: str, where: str) -> Iterator[None]:
    """Turn every error of the user's own code, and a call of sys.exit, into ConfigError."""
    try:
        yield
    except HeadwayError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{where}: {path} cannot be made: {type(error).__name__}: {error}.") from error


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
