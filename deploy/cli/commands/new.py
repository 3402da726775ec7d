"""`headway new`: working examples, to be changed into one's own."""

from pathlib import Path

import click

from headway.deploy.printing import say, say_json

from .options import json_option


@click.group(no_args_is_help=True)
def new() -> None:
    """Write a working example, to be changed into your own."""


@new.command()
@click.argument("directory", type=click.Path(path_type=Path))
@json_option
def flow(directory: Path, as_json: bool) -> None:
    """Write a training flow of your own into DIRECTORY, which must not exist.

    It has a prompt source, a reward, an environment, an objective, a stage and a metric sink, each in a short file,
    with tests and a recipe that trains a tiny model on a CPU in less than a minute.
    """
    from headway.deploy.flow.new import write_flow

    files = write_flow(directory)
    if as_json:
        say_json({"directory": str(directory), "files": files})
        return
    for file in files:
        say(str(directory / file))
    say(f"Try it: cd {directory} && pytest && headway run recipe.yaml")
