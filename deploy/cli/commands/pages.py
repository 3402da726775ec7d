"""The commands that show runs as an HTML page."""

from pathlib import Path

import click

from .options import json_option


@click.command()
@click.argument("run")
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), help="The HTML file.  [default: RUN's name.html here]"
)
@json_option
def report(run: str, output: Path | None, as_json: bool) -> None:
    """Write one HTML page that shows RUN: its figures, curves, lag, time, events and recipe.

    RUN is a run's directory or its name below ./runs; it may be running. The page needs no network. --json prints what
    the page shows, and writes it only with --output.
    """
    from deploy.cli.pages import write_page

    write_page([run], output, as_json=as_json)
