"""MkDocs makes these pages of the site from the code when it builds the site; none of them is committed.

MkDocs calls `on_files` (see `hooks` in mkdocs.yml). Each function here makes one page, as Markdown.
"""

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from msgspec.inspect import type_info

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

    from headway.deploy.flow.interface import Name

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
PROMETHEUS = ROOT / "deploy" / "observe" / "prometheus"
LINKED_TEST = re.compile(r"\]\(reference/tests\.md#([\w-]+)\)")
UNITS = {"_bytes_per_s": "bytes a second", "_s": "seconds", "_bytes": "bytes", "_tokens": "tokens", "_steps": "steps"}
LISTED = re.compile(r"(?:^|(?<=[,;:.] ))([a-z]\w*)(?=,| \(|: )")
"""A word by itself in a list, or before its explanation."""
NAMES_KINDS = re.compile(r"(?:kind|preset|backend|\.url)$")
BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}

GUIDES = {
    "headway acl": "[Two or more machines](../guides/roles.md#two-or-more-machines)",
    "headway broker": "[Separate roles](../guides/roles.md)",
    "headway compare": "[Several runs side by side](../guides/report.md#several-runs-side-by-side)",
    "headway dashboard": "[The page of a running run](../guides/report.md#the-page-of-a-running-run)",
    "headway export": "[Export](../guides/export.md#export)",
    "headway chat": "[Talk with a model](../guides/export.md#talk-with-it)",
    "headway generate": "[Answer a file of prompts](../guides/export.md#answer-a-file-of-prompts)",
    "headway report": "[A page of a run](../guides/report.md)",
    "headway metrics": "[Prometheus](../guides/metrics.md#prometheus)",
    "headway launch kubernetes": "[Kubernetes](../guides/kubernetes.md)",
    "headway launch slurm": "[Slurm](../guides/slurm.md)",
    "headway new flow": "[Python interface](python.md)",
    "headway status": "[What headway status shows](../guides/metrics.md#what-headway-status-shows)",
}
"""The guide to a command, by the command's full name."""


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Add the generated pages, and the results of the benchmarks."""
    from mkdocs.structure.files import File

    for path, page in pages().items():
        files.append(File.generated(config, path, content=page))
    return files


def pages() -> dict[str, str]:
    """Every generated page by its path below docs/."""
    made: Mapping[str, Callable[[], str]] = {
        "reference/configuration.md": configuration,
        "reference/commands.md": commands,
        "reference/algorithms.md": algorithms,
        "reference/other-names.md": other_names,
        "reference/metrics.md": metrics,
        "reference/python.md": python,
        "reference/wire.md": wire,
        "reference/keys.md": keys,
        "reference/tests.md": tests,
        "notes/results.md": results,
    }
    return {path: page() for path, page in made.items()}


class Key(msgspec.Struct, frozen=True):
    """One key of a recipe that holds a value."""

    path: str
    kind: str
    bounds: str
    default: str
    meaning: str


def config_keys() -> Iterator[Key]:
    """Every key of a recipe, in the recipe's order."""
    from headway.deploy.recipe.recipe import Recipe

    yield from _keys_of(Recipe, "")


def configuration() -> str:
    """Every key with its type, default, unit, bounds and meaning."""
    text = (
        "# Configuration\n\nThis page lists every key of a recipe. The command line overrides a key by `a.b=c`, and an"
        " item of a list by `'a[0].b=c'`.\n"
    )
    section = ""
    for key in config_keys():
        if key.path.split(".")[0] != section:
            section = key.path.split(".")[0]
            text += f"\n## {section.removesuffix('[]')}\n"
        facts = ", ".join(part for part in (key.kind, key.bounds) if part)
        text += f"\n`{key.path}`\n:   {_sentence(key.meaning)}\n\n    {_sentence(facts)} {key.default}\n"
    return text


def _keys_of(config: type[msgspec.Struct], above: str) -> Iterator[Key]:
    for field in msgspec.structs.fields(config):
        path = f"{above}{field.encode_name}"
        kind, meaning = _unwrapped(field.type)
        below, is_list = _config_below(kind)
        if below is None:
            yield Key(path, _kind(kind), _bounds(path, kind), _default(field), _copyable(path, kind, meaning))
        else:
            yield from _keys_of(below, f"{path}[]." if is_list else f"{path}.")


def _copyable(path: str, kind: msgspec.inspect.Type, meaning: str) -> str:
    """Mark as code the values that a meaning lists or explains, so that a reader copies them as they are written."""
    values = kind.values if isinstance(kind, msgspec.inspect.LiteralType) else ()
    kinds, own, rest = meaning.partition("or your own") if NAMES_KINDS.search(path) else ("", "", meaning)
    kinds = LISTED.sub(r"`\1`", kinds)
    return kinds + own + LISTED.sub(lambda word: f"`{word[1]}`" if word[1] in values else word[1], rest)


def _unwrapped(annotation: Any) -> tuple[msgspec.inspect.Type, str]:
    info = type_info(annotation)
    if isinstance(info, msgspec.inspect.Metadata):
        return info.type, (info.extra_json_schema or {}).get("description", "")
    return info, ""


def _config_below(kind: msgspec.inspect.Type) -> tuple[type[msgspec.Struct] | None, bool]:
    """The section that a key opens, and whether it is a list of such sections."""
    if isinstance(kind, msgspec.inspect.VarTupleType):
        return _config_below(_plain(kind.item_type))[0], True
    if isinstance(kind, msgspec.inspect.UnionType):
        found = [_config_below(_plain(one))[0] for one in kind.types]
        return next((one for one in found if one), None), False
    return (kind.cls if isinstance(kind, msgspec.inspect.StructType) else None), False


def _plain(kind: msgspec.inspect.Type) -> msgspec.inspect.Type:
    return kind.type if isinstance(kind, msgspec.inspect.Metadata) else kind


def _kind(kind: msgspec.inspect.Type) -> str:
    match kind:
        case msgspec.inspect.LiteralType(values):
            return "one of " + ", ".join(f"`{value}`" for value in values)
        case msgspec.inspect.UnionType(types):
            return " or ".join(_kind(_plain(one)) for one in types)
        case msgspec.inspect.VarTupleType(item) | msgspec.inspect.ListType(item):
            return f"list of {_kind(_plain(item))}"
        case msgspec.inspect.TupleType(items):
            return f"list of {len(items)} times {_kind(_plain(items[0]))}"
    names = {"Int": "whole number", "Float": "number", "Bool": "true or false", "Str": "text", "Dict": "mapping"}
    return names.get(name := type(kind).__name__.removesuffix("Type"), "null" if name == "None" else name.lower())


def _bounds(path: str, kind: msgspec.inspect.Type) -> str:
    from headway.deploy.recipe.validate import LIMITS

    of_type = {word: getattr(kind, name, None) for name, word in BOUNDS.items()}
    told = [f"{word} {_number(bound)}" for word, bound in of_type.items() if bound is not None]
    limit = LIMITS.get(path.replace("[]", ""))
    if limit is not None and not any(bound.startswith("at most") for bound in told):
        told.append(f"at most {_number(limit.high)} ({limit.reason})")
    unit = next((unit for suffix, unit in UNITS.items() if path.endswith(suffix)), "")
    return ", ".join(filter(None, [f"in {unit}" if unit else "", *told]))


def _number(bound: float) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default is not msgspec.NODEFAULT:
        value = field.default
    elif field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    else:
        metas = getattr(field.type, "__metadata__", ())
        said = next((meta.extra["default"] for meta in metas if isinstance(meta, msgspec.Meta) and meta.extra), "")
        return f"Default: {said}." if said else "It must be given."
    return f"Default: `{msgspec.json.encode(value).decode()}`."


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""


def commands() -> str:
    """Every command with its arguments and options."""
    from headway.deploy.cli.main import cli

    text = "# Commands\n\nEvery command has `--help`. `--debug` adds a traceback to an error.\n"
    return text + "".join(_command_page(command, context) for command, context in shown_commands(cli))


def shown_commands(group: click.Group) -> Iterator[tuple[click.Command, click.Context]]:
    """Every command that is not hidden, with a context that knows its full name."""
    yield from _commands_below(group, click.Context(group, info_name="headway"))


def _commands_below(group: click.Group, above: click.Context) -> Iterator[tuple[click.Command, click.Context]]:
    for name, command in group.commands.items():
        context = click.Context(command, info_name=name, parent=above)
        if command.hidden:
            continue
        if isinstance(command, click.Group):
            yield from _commands_below(command, context)
        else:
            yield command, context


def _command_page(command: click.Command, context: click.Context) -> str:
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    text = f"\n## {context.command_path}\n\n```text\n{usage}\n```\n\n{inspect.cleandoc(command.help or '')}\n"
    if guide := GUIDES.get(context.command_path):
        text += f"\nThe guide: {guide}.\n"
    for option in command.params:
        record = option.get_help_record(context) if isinstance(option, click.Option) else None
        if record:
            text += f"\n`{record[0]}`\n:   {' '.join(record[1].split())}\n"
    return text


def algorithms() -> str:
    """Every preset, and every function with its equation, defaults and source."""
    from headway.learner.objective.catalog import PARTS, compositions, functions

    text = "# Algorithms\n\n`algorithm.preset` names a published composition; each part can be set by itself.\n"
    text += "\n## Presets\n"
    names = [preset.name for preset in compositions()]
    for preset in compositions():
        parts = "\n".join(
            f"    - `{name}`: `{msgspec.json.encode(value).decode()}`" for name, value in preset.algorithm.items()
        )
        note = re.sub(rf"^(?:{'|'.join(names)})\b", lambda name: f"`{name[0]}`", preset.note)
        facts = " ".join(filter(None, (_sentence(note), f"Source: {preset.source}." if preset.source else "")))
        text += f"\n`{preset.name}`\n:   {facts}\n\n{parts}\n"
    for part in PARTS:
        text += f"\n## {part}\n"
        for one in functions():
            if one.part == part:
                defaults = ", ".join(f"`{name}={value}`" for name, value in one.defaults.items())
                told = [
                    one.notes,
                    f"Defaults: {defaults}." if defaults else "",
                    f"Source: {one.source}" if one.source else "",
                ]
                below = "".join(f"\n\n    {' '.join(fact.split())}" for fact in told if fact)
                text += f"\n`{one.name}`\n:   `{one.equation}`{below}\n"
    return text


def other_names() -> str:
    """Every name of verl and TRL that an error answers, in their order."""
    from headway.deploy.recipe.convert import foreign_keys

    text = "# Names in verl and TRL\n\nThe error for an unknown key answers these names of other trainers.\n"
    for trainer, names in (("verl", foreign_keys()["verl"]), ("TRL", foreign_keys()["trl"])):
        text += f"\n## {trainer}\n\n| {trainer} | Headway | what differs |\n|---|---|---|\n"
        for name, (key, remark) in names.items():
            text += f"| `{name}` | {f'`{key}`' if key else ''} | {remark} |\n"
    return text


class Field(msgspec.Struct, frozen=True):
    """One field of a struct that crosses a process."""

    name: str
    kind: str
    meaning: str


@functools.cache
def wire_structs() -> dict[str, tuple[str, tuple[Field, ...]]]:
    """The docstring and fields of every struct of `broker/schema/`."""
    modules = [ast.parse(file.read_text()) for file in sorted((ROOT / "broker" / "schema").glob("*.py"))]
    structs = [node for module in modules for node in module.body if isinstance(node, ast.ClassDef)]
    return {node.name: (ast.get_docstring(node) or "", tuple(_fields(node))) for node in structs}


def _fields(struct: ast.ClassDef) -> Iterator[Field]:
    for node, after in zip(struct.body, [*struct.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield Field(node.target.id, ast.unparse(node.annotation), _docstring_in(after))


def _docstring_in(node: ast.stmt | None) -> str:
    match node:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return " ".join(text.split())
    return ""


def _field_list(fields: tuple[Field, ...]) -> str:
    return "".join(f"\n`{field.name}`\n:   `{field.kind}`. {field.meaning}\n" for field in fields)


def metrics() -> str:
    """Every field of a line of metrics.jsonl, and every metric that Prometheus reads."""
    text = "# Metrics\n\nThe learner writes one line for every step into `metrics.jsonl`, with these fields.\n"
    text += _field_list(wire_structs()["StepMetrics"][1])
    for part, struct in (("by_lag", "LagFigures"), ("agent", "AgentFigures")):
        meaning, fields = wire_structs()[struct]
        text += f"\n## {part}\n\n{meaning}\n{_field_list(fields)}"
    for module, title in (("learner_metrics", "the learner"), ("worker_metrics", "a worker")):
        text += f"\n## Prometheus: {title}\n\n| metric | meaning |\n|---|---|\n"
        text += "".join(f"| `{name}` | {_sentence(meaning)} |\n" for name, meaning in prometheus_metrics(module))
    return text


def prometheus_metrics(module: str) -> Iterator[tuple[str, str]]:
    """Every metric that a module of deploy/observe/prometheus/ makes, with its help, in the order of the module."""
    nodes = ast.walk(ast.parse((PROMETHEUS / f"{module}.py").read_text()))
    for node in sorted(nodes, key=lambda node: getattr(node, "lineno", 0)):
        match node:
            case ast.Call(args=[ast.Constant(value=str(name)), ast.Constant(value=str(meaning)), *_]):
                is_info = isinstance(node.func, ast.Name) and node.func.id == "InfoMetricFamily"
                found = (f"{name}_info" if is_info else name, meaning)
            case ast.Tuple(elts=[ast.Constant(value=str(name)), ast.Constant(value=str(meaning)), *_]):
                found = (name, meaning)
            case _:
                continue
        if name.startswith("headway_"):
            yield found


PROMISE = """
These are all names that your own code may import from Headway. A release that renames or removes one of them, or
changes its signature or its contract, says so in the changelog and raises the minor version, from 1.0.0 on the major
version; a patch release never does. New members with a default may come with any release. Everything else in
Headway's packages may change at any time.

A flow needs about a dozen of them, and each part of it only its own:

| part | needed | for more |
|---|---|---|
| prompt source | `Item` | `PromptSource`, the methods to write |
| reward | none: a function | `RewardFunction`, its signature |
| environment | `Episode`, `Step` | `Environment`, the methods to write; `Prompt`, which an episode holds |
| objective | `Tokens`, `Metrics`, `masked_mean` | `TokenObjective`, its signature |
| stage | `StageParts`, `StageMetrics`, `Progress` | `Example`, `tokenize`, `pack`, `supervised_loss`, to train |
| metric sink | `SinkRun`, `Event`, `StepEvent` | `MetricSink` and the other events |

`Backend`, `Ranks` and `StageCheckpoints` are what `StageParts` holds, and `Stage` says what a stage has. You import
none of these four. The packages are typed (`py.typed`), so that mypy and pyright check your code against them.

A recipe names your code by an import path, `package.module:Name`, of a module in the directory in which you start
Headway, or of one that is installed. The code below is one flow, which trains a tiny model on a CPU in less than a
minute. `headway new flow` writes it, with its recipe and tests:

```sh
headway new flow my-flow
cd my-flow
pytest
headway run recipe.yaml
```
"""


def python() -> str:
    """The interface of a user's own flow, with the example that `headway new flow` writes."""
    from headway.deploy.flow.interface import EXAMPLE, INTERFACE

    def file(path: str) -> str:
        language = Path(path).suffix.removeprefix(".").replace("py", "python")
        return f'\n```{language} title="{path}"\n{(EXAMPLE / path).read_text()}```\n'

    text = f"# Python interface\n{PROMISE}"
    for part in INTERFACE:
        text += f"\n## {part.title}\n\n`{part.key}: package.module:Name`. {part.contract}\n{file(part.example)}"
        text += "".join(_name_page(name) for name in part.names)
    return f"{text}\n## The recipe\n{file('recipe.yaml')}\n## The tests\n{file('test_my_flow.py')}"


def _name_page(name: "Name") -> str:
    from headway.deploy.flow.interface import described

    one = described(name)
    module, _, short = name.path.partition(":")
    shown = textwrap.fill(one.signature, 120, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    signature = "" if one.signature == short else f"```python\n{shown}\n```\n\n"
    text = f"\n### {short}\n\n`from {module} import {short}`\n\n{signature}{one.doc}\n"
    return text + "".join(f"\n`{member.signature}`\n:   {_indented(member.doc)}\n" for member in one.members)


def _indented(doc: str) -> str:
    return doc.replace("\n", "\n    ")


def wire() -> str:
    """Every struct that crosses a process."""
    from headway.broker.schema import SCHEMA_VERSION

    text = (
        f"# Wire schema\n\nThese are all structs that one process sends another, in schema {SCHEMA_VERSION}. A process"
        " refuses messages of another schema.\n"
    )
    for name, (meaning, fields) in wire_structs().items():
        text += f"\n## {name}\n\n{meaning}\n{_field_list(fields)}"
    return text


def keys() -> str:
    """The table of Redis keys."""
    from headway.broker import keys as module

    before, table, after = re.split(r"\n-{5}[- ]*\n|\n\n(?=Fields of `meta`)", inspect.getdoc(module) or "")
    before = before.rsplit("\n", 1)[0]
    text = f"# Redis keys\n\n{before}\n| key | type | meaning | lifetime | written by |\n|---|---|---|---|---|\n"
    for key, kind, *rest in _key_rows(table):
        meaning, lifetime, writer = (*rest[:-1], "", rest[-1])[:3] if len(rest) == 2 else rest
        text += f"| `{key}` | {kind} | {meaning} | {lifetime} | {writer} |\n"
    return f"{text}\n{after}\n"


def _key_rows(table: str) -> list[list[str]]:
    """The table's cells; a line that starts with blanks goes on with the meaning of the line before."""
    rows: list[list[str]] = []
    for line in table.splitlines():
        if line.startswith(" "):
            rows[-1][2] += f"; {line.strip()}"
        else:
            rows.append(re.split(r" {2,}", line.strip()))
    return rows


def tests() -> str:
    """The test files that the guarantees link, with their tests."""
    text = "# Tests of the guarantees\n\nThe tests that [What is guaranteed](../guarantees.md) names.\n"
    for anchor in sorted(set(linked_tests())):
        path = linked_test_path(anchor)
        module = ast.parse(path.read_text())
        names = [node.name for node in ast.walk(module) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        listed = "".join(f"- {name.removeprefix('test_').replace('_', ' ')}\n" for name in names if name[:5] == "test_")
        about = (ast.get_docstring(module) or "").split("\n\n")[0]
        text += f"\n## {path.relative_to(ROOT)} {{ #{anchor} }}\n\n{about}\n\n{listed}"
    return text


def results() -> str:
    """The results of the benchmarks, whose links to notes lead to their neighbours on the site."""
    return RESULTS.read_text().replace("](../docs/notes/", "](")


def linked_tests() -> list[str]:
    """The anchors of the test files that the guarantees link."""
    return LINKED_TEST.findall((ROOT / "docs" / "guarantees.md").read_text())


def linked_test_path(anchor: str) -> Path:
    """The file of a linked test: `broker-test_leases` is tests/broker/test_leases.py."""
    return ROOT / "tests" / f"{anchor.replace('-', '/')}.py"
