"""The tables that `headway algorithms` prints."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table

from headway.deploy.terminal import headed_table, styled
from headway.learner.objective.catalog import PARTS, Composition, Function, compositions, functions


def overview() -> RenderableType:
    """Return all definitions, one on a line."""
    return Group(_presets_table(), *(_functions_table(part) for part in PARTS), FOOTER)


FOOTER = """
`headway algorithms NAME` shows one in full. In a recipe: algorithm.preset=NAME, or any part of it:
algorithm.objective.kind=cispo, algorithm.objective.options.clip_high=0.3. Your own: package.module:function.
Preferences: `loss` of a stage dpo, or algorithm.objective.kind beneath algorithm.preset=online_dpo."""


def page(one: Function | Composition) -> RenderableType:
    """Return one definition in full."""
    if isinstance(one, Function):
        return _function_page(one)
    parts = Table.grid(padding=(0, 2))
    for name, value in one.algorithm.items():
        parts.add_row(name, _inline(value))
    named = _named_by(one.algorithm)
    pages = [_function_page(other) for other in functions() if (other.part, other.name) in named]
    texts = [styled(text) for text in (one.note, f"Source: {one.source}.") if text]
    return Group(Panel(Group(parts, *texts), title=f"preset {one.name}", title_align="left"), *pages)


def _named_by(algorithm: Mapping[str, Any]) -> set[tuple[str, str]]:
    corrections = {("correction", correction["kind"]) for correction in algorithm["corrections"]}
    others = {(part, algorithm[part]["kind"]) for part in ("advantage", "objective", "aggregation")}
    of_pairs = ("preference", algorithm["objective"]["kind"])
    return corrections | others | {of_pairs, ("proximal", algorithm.get("proximal", ""))}


def _presets_table() -> Table:
    table = headed_table("preset", "advantage", "objective (anchor)", "corrections", "aggregation", "source")
    for one in compositions():
        algorithm = one.algorithm
        table.add_row(
            one.name,
            algorithm["advantage"]["kind"],
            f"{algorithm['objective']['kind']} ({algorithm['objective']['anchor']})",
            ", ".join(correction["kind"] for correction in algorithm["corrections"]) or "-",
            algorithm["aggregation"]["kind"],
            one.source.split(",")[0],
        )
    return table


def _functions_table(part: str) -> Table:
    table = headed_table(part, "equation", "defaults")
    for one in functions():
        if one.part == part:
            name = f"{one.name} *" if one.is_weight else one.name
            table.add_row(name, one.equation, _defaults(one))
    if part == "correction":
        table.caption = "* multiplies by the policy's ratio to the behavior policy: at most one of these"
    return table


def _function_page(one: Function) -> Panel:
    texts = [styled((one.equation, "bold"))]
    texts += [styled(text) for text in (one.notes, f"Defaults: {_defaults(one)}", f"Source: {one.source}") if text]
    return Panel(Group(*texts), title=f"{one.part} {one.name}", title_align="left")


def _defaults(one: Function) -> str:
    return ", ".join(f"{name} {value}" for name, value in one.defaults.items()) or "-"


def _inline(value: Any) -> str:
    """Return a part of a composition on one line."""
    if isinstance(value, dict):
        options = ", ".join(f"{name} {option}" for name, option in value.get("options", {}).items())
        rest = ", ".join(f"{name} {other}" for name, other in value.items() if name not in ("kind", "options"))
        return " ".join(filter(None, (str(value.get("kind", "")), f"({rest})" if rest else "", options)))
    return ", ".join(_inline(one) for one in value) or "-" if isinstance(value, list) else str(value)
