"""The report of `headway data inspect`: a table of uses, what is wrong, and examples with the trained tokens marked."""

from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headway.broker.errors import ConfigError
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.recipe.resolve import load_recipe
from headway.deploy.terminal import WordWrapTable, styled
from headway.learner.config import ModelConfig
from headway.learner.data.inspection import Inspection, RenderedRecord, UseReport
from headway.learner.data.prompts.files import named_fields
from headway.learner.data.records import RecordOptions

EXAMPLES = 3
LONGEST_PIECE = 600
"""Characters of a piece that are shown; of a longer one the middle is left out."""
STAGES = {"rl": "rl: prompts", "sft": "sft: conversations", "preferences": "preferences", "kto": "kto: labelled"}


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One file, to programs."""

    path: str
    is_usable: bool
    """Whether a stage can train on it."""
    uses: list[UseReport]
    examples: list[RenderedRecord]


def inspect_data(path: str, options: dict[str, Any], recipe: str, model: str) -> Report:
    """Return what the file is to each stage; with examples if a recipe or a model's directory is given. The columns of
    prompts have the names that the recipe gives them."""
    if recipe and model:
        raise ConfigError("--recipe and --model exclude each other: a recipe names its model.")
    loaded = load_recipe(recipe) if recipe else None
    fields = named_fields(loaded.prompts.options) if loaded else None
    inspection = Inspection(path, msgspec.convert(options, RecordOptions), fields)
    findings = inspection.findings
    return Report(
        path=path,
        is_usable=any(finding.records for finding in findings),
        uses=findings,
        examples=_examples(inspection, loaded, model) if loaded or model else [],
    )


def _examples(inspection: Inspection, recipe: Recipe | None, model: str) -> list[RenderedRecord]:
    from headway.learner.data.prompts.rendering import Renderer
    from headway.learner.models.pretrained import load_tokenizer

    tokenizer = load_tokenizer(recipe.model if recipe else ModelConfig(path=model))
    return inspection.examples(tokenizer, Renderer(tokenizer, recipe.prompts.system_prompt if recipe else ""), EXAMPLES)


def page(report: Report) -> RenderableType:
    """Return the report for a terminal."""
    shown: list[RenderableType] = [WordWrapTable(_table(report)), *_wrong(report)]
    if report.examples:
        shown.append(styled("\nTrained tokens are ", ("⟦marked⟧", "bold green"), "."))
    return Group(*shown, *(_example(example) for example in report.examples))


def _table(report: Report) -> Table:
    table = Table(
        "stage", "looks like", "rows", "records", "broken rows", title=styled(report.path), title_justify="left"
    )
    for finding in report.uses:
        broken = sum(each.rows for each in finding.broken)
        layout = finding.layout or "no"
        counts = [f"{count:,}" if finding.records else "" for count in (finding.rows, finding.records, broken)]
        table.add_row(STAGES[finding.use], layout, *counts)
    return table


def _wrong(report: Report) -> list[RenderableType]:
    usable = [finding for finding in report.uses if finding.records]
    lines: list[RenderableType] = [
        styled((f"{finding.use}: ", "bold"), f"{each.rows:,} {each.reason}; the first: {each.first}")
        for finding in usable
        for each in finding.broken
    ]
    if not usable:
        lines += [styled((f"{finding.use}: ", "bold"), finding.error) for finding in report.uses]
    return lines


def _example(example: RenderedRecord) -> Text:
    head = f"\n{example.place}, {example.what}: {example.tokens:,} tokens, {example.trained_tokens:,} trained\n"
    pieces = [
        (f"⟦{_shortened(text)}⟧", "bold green") if is_trained else (_shortened(text), "dim")
        for text, is_trained in example.pieces
    ]
    return styled((head, "bold"), *pieces, f"\n({example.note})" if example.note else "")


def _shortened(text: str) -> str:
    half = LONGEST_PIECE // 2
    return text if len(text) <= LONGEST_PIECE else f"{text[:half]} [...] {text[-half:]}"
