"""`headway data`: what a data file is to each stage, and published sets as prompts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from headway.deploy.printing import say, say_json

from .options import json_option

F = TypeVar("F", bound=Callable[..., Any])


@click.group(no_args_is_help=True)
def data() -> None:
    """Look at data files, and prepare published sets."""


@data.command()
@click.argument("file")
@click.option(
    "--recipe",
    default="",
    help="Read prompts from the columns that this recipe names, and show examples as its model gets them.",
)
@click.option("--model", default="", metavar="DIR", help="Show examples as this model gets them.")
@click.option(
    "--format", "layout", default="", metavar="NAME", help="Read it in this layout.  [default: by its columns]"
)
@click.option("--dataset", default="", metavar="NAME", help="A data set of the directory's dataset_info.json.")
@click.option("--split", default="train", show_default=True, help="The split of a saved data set, or of one on a hub.")
@json_option
def inspect(file: str, recipe: str, model: str, layout: str, dataset: str, split: str, as_json: bool) -> int:
    """Say what FILE is to each stage: its layout, its rows, and what is wrong with them.

    FILE is JSON lines, a JSON list, Parquet, Arrow, text, a directory that `datasets` saved or that has a
    dataset_info.json, hf:OWNER/NAME or modelscope:OWNER/NAME. With --recipe or --model, three examples follow, with the
    trained tokens marked. The exit code is 1 if no stage can train on it.
    """
    from headway.deploy.terminal import Terminal

    from .data_report import inspect_data, page

    report = inspect_data(file, {"format": layout, "dataset": dataset, "split": split}, recipe, model)
    if as_json:
        say_json(report)
    else:
        Terminal().print(page(report))
    return int(not report.is_usable)


def _dataset_options(command: F) -> F:
    """Add the options that the published sets have in common."""
    options = (
        click.option(
            "--from",
            "source",
            required=True,
            metavar="SOURCE",
            help="A file of the set, its directory, hf:OWNER/NAME or modelscope:OWNER/NAME.",
        ),
        click.option("--split", default="train", show_default=True, help="The split of a set on a hub."),
        click.option("--subset", default=None, help="The subset of a set on a hub.  [default: main for gsm8k]"),
        click.option(
            "--out",
            required=True,
            type=click.Path(path_type=Path),
            help="The file to write: FILE.jsonl or FILE.parquet.",
        ),
        click.option("--as-text", is_flag=True, help="Prompts are text, for a model without a chat template."),
        click.option("--skip-broken", is_flag=True, help="Leave out rows without an answer, and count them."),
        json_option,
    )
    for option in reversed(options):
        command = option(command)
    return command


@data.command()
@_dataset_options
@click.option(
    "--answer",
    "instruction",
    type=click.Choice(["boxed", "hashes"]),
    default="boxed",
    show_default=True,
    help="Ask for \\boxed{}, which the reward math_verify reads, or for ####, as verl's example does.",
)
def gsm8k(instruction: str, **options: Any) -> None:
    """Write GSM8K's rows {question, answer} as prompts with their ground truth.

    The ground truth is the number behind ####, without commas.
    """
    _write("gsm8k", instruction, **options)


@data.command()
@_dataset_options
def math(**options: Any) -> None:
    """Write MATH's rows {problem, level, type, solution} as prompts with their ground truth.

    The ground truth is what the last \\boxed{} of the solution holds.
    """
    _write("math", "boxed", **options)


def _write(
    name: str,
    instruction: str,
    *,
    source: str,
    split: str,
    subset: str | None,
    out: Path,
    as_text: bool,
    skip_broken: bool,
    as_json: bool,
) -> None:
    from headway.learner.data.math_datasets import prepare, write_rows

    on_bad_row = "skip" if skip_broken else "refuse"
    prepared = prepare(
        name, source, instruction=instruction, as_text=as_text, on_bad_row=on_bad_row, subset=subset, split=split
    )
    write_rows(prepared.rows, out)
    if as_json:
        say_json({"out": str(out), "rows": len(prepared.rows), "skipped": prepared.skipped.counts})
        return
    say(f"{out}: {len(prepared.rows):,} prompts")
    if prepared.skipped.total:
        say(f"skipped: {prepared.skipped}")
