"""Describes a typed Python function to a model, and reads the arguments with which the model calls it."""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Annotated, Any, get_type_hints

import msgspec

from headway.broker.errors import ConfigError
from headway.rollout_workers.agents.conversation import Tool

from .threads import EpisodeThread
from .toolbox import ArgumentsError

SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$")
PARAMETER = re.compile(r"^(\s+)\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


class TypedFunction:
    """A function with its name, description and parameters, as a model reads them."""

    def __init__(self, function: Callable[..., Any], where: str, name: str = "") -> None:
        """Raises ConfigError for a function whose parameters lack types, or have types that JSON cannot express."""
        self.function = function
        self.name = name or getattr(function, "__name__", type(function).__name__)
        self._where = where
        says, of_parameters = _described(inspect.getdoc(function) or "")
        self._arguments = self._struct(of_parameters)
        self.schema: Tool = {
            "type": "function",
            "function": {"name": self.name, "description": says, "parameters": self._parameters()},
        }

    def read(self, arguments: str) -> dict[str, Any]:
        """Return the arguments by name. Raises msgspec.MsgspecError, whose message says what is wrong with them."""
        read = msgspec.json.decode(arguments.strip() or "{}", type=self._arguments)
        given = {name: getattr(read, name) for name in self._arguments.__struct_fields__}
        return {name: value for name, value in given.items() if value is not msgspec.UNSET}

    def _struct(self, of_parameters: dict[str, str]) -> type[msgspec.Struct]:
        try:
            hints = get_type_hints(self.function, include_extras=True)
        except Exception as error:
            raise self._error(f"its types cannot be read: {type(error).__name__}: {error}") from error
        fields: list[tuple[str, Any, Any]] = []
        for one in inspect.signature(self.function).parameters.values():
            if one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL, one.POSITIONAL_ONLY):
                raise self._error(f"the parameter {one} has no single name by which a model could give it")
            if one.name not in hints:
                raise self._error(f"the parameter {one.name} has no type; write {one.name}: str or another type")
            says = of_parameters.get(one.name, "")
            hint = msgspec_type(hints[one.name], says)
            is_optional = one.default is not one.empty
            fields.append(
                (
                    one.name,
                    hint | msgspec.UnsetType if is_optional else hint,
                    msgspec.UNSET if is_optional else msgspec.NODEFAULT,
                )
            )
        return msgspec.defstruct(self.name, fields, kw_only=True, forbid_unknown_fields=True)

    def _parameters(self) -> dict[str, Any]:
        """Return the JSON schema of the arguments, with the types that it refers to."""
        try:
            (own,), others = msgspec.json.schema_components((self._arguments,), ref_template="#/$defs/{name}")
            msgspec.json.Decoder(self._arguments)
        except (TypeError, ValueError, RuntimeError) as error:
            raise self._error(f"its types cannot be written as JSON: {error}") from error
        schema = dict(others.pop(own["$ref"].rpartition("/")[2]))
        schema = {name: value for name, value in schema.items() if name != "title"}
        return {**schema, "$defs": others} if others else schema

    def _error(self, reason: str) -> ConfigError:
        return ConfigError(f"{self._where}: {self.name} is no tool: {reason}.")


class FunctionTool:
    """A typed Python function, called in the episode's thread: an implementation of `toolbox.OpenTool`."""

    def __init__(self, function: TypedFunction, thread: EpisodeThread) -> None:
        self.name, self.schema = function.name, function.schema
        self._function = function
        self._thread = thread

    async def call(self, arguments: str, deadline_s: float) -> Any:
        """See OpenTool."""
        try:
            given = self._function.read(arguments)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise ArgumentsError(str(error)) from error
        return await self._thread.call(self._function.function, deadline_s=deadline_s, **given)


def check_names(tools: Iterable[TypedFunction], where: str) -> None:
    """Raise ConfigError where two tools have one name."""
    for name, count in Counter(tool.name for tool in tools).items():
        if count > 1:
            raise ConfigError(f"{where}: {count} tools have the name {name}; give each its own.")


def msgspec_type(hint: Any, says: str) -> Any:
    """Return a type with the description of its parameter."""
    return Annotated[hint, msgspec.Meta(description=says)] if says else hint


def _described(docstring: str) -> tuple[str, dict[str, str]]:
    """Return what a docstring in Google's style says of the function, and of each parameter."""
    says, of_parameters, section, name, indent = [], dict[str, str](), "", "", 0
    for line in docstring.splitlines():
        if found := SECTION.match(line):
            section, name = found[1], ""
        elif not section:
            says.append(line)
        elif section in ("Args", "Arguments", "Parameters"):
            found = PARAMETER.match(line)
            if found and (not name or len(found[1]) <= indent):
                name, indent = found[2], len(found[1])
                of_parameters[name] = found[3]
            elif name and line.strip():
                of_parameters[name] = f"{of_parameters[name]} {line.strip()}".strip()
    return "\n".join(says).strip(), of_parameters
