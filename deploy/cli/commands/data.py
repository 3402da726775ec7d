"""`headway data`: what a data file is to each stage, and published sets as prompts."""

import click

from deploy.printing import say_json

from .options import json_option


@click.group(no_args_is_help=True)
def data() -> None:
    """Look at data files, and prepare published sets."""


@data.command()
@click.argument("file")
@click.option("--recipe", default="", help="Show examples as this recipe's model gets them.")
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
    from deploy.cli.data_pages import inspect_data, page
    from deploy.terminal import Terminal

    report = inspect_data(file, {"format": layout, "dataset": dataset, "split": split}, recipe, model)
    if as_json:
        say_json(report)
    else:
        Terminal().print(page(report))
    return int(not report.is_usable)
