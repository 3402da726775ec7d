"""Reads signatures and docstrings of names from the source, so that nothing is imported for a page of them."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .interface import Name

Function = ast.FunctionDef | ast.AsyncFunctionDef
ABOVE = Path(__file__).parents[3]
"""The directory in which `headway` lies."""


@dataclass(frozen=True)
class Described:
    """A name, or a member of one."""

    signature: str
    """As a caller needs it, such as `train(epoch: int, position: int) -> Item`."""
    doc: str
    """Its docstring, or the one below its annotation."""
    members: tuple["Described", ...] = ()


def described(name: Name) -> Described:
    """Return what the source says of the name, with its public members in the source's order. Raises LookupError where
    it lacks the name or one of the members."""
    module, _, wanted = name.path.partition(":")
    node, after = _definition(module, wanted)
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return _function(node)
        case ast.Assign():
            return Described(ast.unparse(node), _text_of(after))
    found = {_name(each): each for each in _members(node)}
    if missing := set(name.members) - set(found):
        raise LookupError(f"{name.path} lacks {', '.join(sorted(missing))}")
    members = [each for member, each in found.items() if not name.members or member in name.members]
    return Described(node.name, _doc(node), tuple(members))


def _definition(module: str, wanted: str) -> tuple[ast.ClassDef | Function | ast.Assign, ast.stmt | None]:
    """Return the definition, of this module or of the one from which it is imported, and the statement after it."""
    for node, after in _with_next(_tree(module).body):
        match node:
            case ast.ClassDef(name=found) | ast.FunctionDef(name=found) | ast.AsyncFunctionDef(name=found):
                if found == wanted:
                    return node, after
            case ast.Assign(targets=[ast.Name(id=found)]) if found == wanted:
                return node, after
            case ast.ImportFrom() if wanted in [alias.name for alias in node.names]:
                return _definition(_imported_from(module, node), wanted)
    raise LookupError(f"{module} has no {wanted}")


def _with_next(body: list[ast.stmt]) -> Iterator[tuple[ast.stmt, ast.stmt | None]]:
    return zip(body, [*body[1:], None], strict=True)


def _tree(module: str) -> ast.Module:
    return ast.parse(_file(module).read_text())


def _file(module: str) -> Path:
    path = ABOVE.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _imported_from(module: str, node: ast.ImportFrom) -> str:
    """Return the module's full name; inside a folder imports have a single dot."""
    if not node.level:
        return str(node.module)
    package = module if _file(module).name == "__init__.py" else module.rpartition(".")[0]
    return f"{package}.{node.module}"


def _members(node: ast.ClassDef) -> Iterator[Described]:
    """Yield public fields, properties and methods."""
    for statement, after in _with_next(node.body):
        match statement:
            case ast.AnnAssign(target=ast.Name(id=field)) if not field.startswith("_"):
                default = "" if statement.value is None else f" = {ast.unparse(statement.value)}"
                yield Described(f"{field}: {ast.unparse(statement.annotation)}{default}", _text_of(after))
            case ast.FunctionDef() | ast.AsyncFunctionDef() if _is_public(statement):
                yield _function(statement)


def _name(member: Described) -> str:
    return re.split(r"[:(]", member.signature.removeprefix("async "))[0]


def _is_public(function: Function) -> bool:
    """Whether callers use it. Of a function's protocol they use the call."""
    return function.name == "__call__" or not function.name.startswith("_")


def _function(node: Function) -> Described:
    arguments = ast.unparse(node.args).removeprefix("self").removeprefix(", ")
    returned = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    if any(isinstance(one, ast.Name) and one.id == "property" for one in node.decorator_list):
        return Described(f"{node.name}:{returned.removeprefix(' ->')}", _doc(node))
    later = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    return Described(f"{later}{node.name}({arguments}){returned}", _doc(node))


def _doc(node: ast.ClassDef | Function) -> str:
    return ast.get_docstring(node) or ""


def _text_of(node: ast.stmt | None) -> str:
    match node:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return " ".join(text.split())
    return ""
