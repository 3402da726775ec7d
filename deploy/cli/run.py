"""`headway run` and `headway ray up`: a whole run on this machine, or on the nodes of a Ray cluster."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING

import click

from headway.deploy.printing import complain, say, say_json

from .options import overrides_argument, rewind_of, run_arguments, start_options

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headway.deploy.launch.base import Launcher
    from headway.deploy.recipe.recipe import Recipe
    from headway.learner.experience.log import Rewind


@click.command()
@run_arguments
@click.option(
    "--from", "first", metavar="STAGE", help="Go on (--resume) with this stage; what it starts from must be done."
)
@click.option("--until", "last", metavar="STAGE", help="End with this stage, such as sft or its number.")
def run(
    recipe: str,
    overrides: tuple[str, ...],
    resume: bool,
    overwrite: bool,
    force: bool,
    rewind_to: int | None,
    regenerate: bool,
    dry_run: bool,
    as_json: bool,
    first: str | None,
    last: str | None,
) -> int:
    """Run a whole RECIPE on this machine.

    It starts a server, the stages before the learner, the learner and its workers. RECIPE is a YAML file or the
    name of one that ships. Ctrl-C drains, writes a checkpoint and stops; a second one stops at once.
    """
    if first is not None and overwrite:
        raise click.UsageError("--from and --overwrite exclude each other: --overwrite removes what stages have left.")
    resume = resume or first is not None
    rewind = rewind_of(resume, overwrite, rewind_to, regenerate)
    return execute(
        recipe,
        overrides,
        resume,
        overwrite,
        rewind,
        is_forced=force,
        dry_run=dry_run,
        as_json=as_json,
        first=first,
        last=last,
    )


def execute(
    recipe: str,
    overrides: tuple[str, ...],
    resume: bool,
    overwrite: bool,
    rewind: "Rewind | None",
    *,
    is_forced: bool,
    dry_run: bool,
    as_json: bool,
    first: str | None = None,
    last: str | None = None,
) -> int:
    """Run the recipe with the launcher that it names, and return the exit code."""
    from headway.deploy.recipe.resolve import load_recipe

    loaded = load_recipe(recipe, overrides, hint=complain)
    from headway.deploy.launch.local_run import LocalRun, open_launcher
    from headway.deploy.recipe.stage_graph import number_of
    from headway.deploy.run.record import read_summary
    from headway.deploy.terminal import Terminal

    terminal = Terminal(stderr=as_json)
    begins = number_of(loaded.plan, first) if first is not None else 0
    ends = number_of(loaded.plan, last) if last is not None else None
    if ends is not None and ends < begins:
        raise click.UsageError(f"--until {last} comes before --from {first}.")

    shares = cache(partial(_shares, loaded))

    def local(launcher: "Launcher") -> LocalRun:
        manner = (resume, overwrite, terminal, rewind, is_forced)
        return LocalRun(loaded, recipe, overrides, *manner, launcher, begins, ends, shares)

    if dry_run:
        with printing_launcher(as_json) as launcher:
            return local(launcher).run()
    code = local(open_launcher(loaded.launcher)).run()
    if as_json:
        say_json(read_summary(loaded.run_directory))
    return code


def _shares(recipe: "Recipe") -> "Mapping[str, float]":
    """Return what the engines of each pool get of the GPUs that they share on this machine."""
    from headway.deploy.recipe.placement import engine_shares, only_gpu_bytes

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def part_of_learner(_: str) -> float | None:
        if (device_bytes := only_gpu_bytes(visible)) is None:
            return None
        from .memory_report import learner_part  # it takes seconds to import

        return learner_part(recipe, device_bytes)

    return engine_shares(recipe, visible, part_of_learner) if recipe.launcher.kind == "local" else {}


@click.command(hidden=True)
@click.argument("recipe")
@overrides_argument
@start_options
def prepare(
    recipe: str,
    overrides: tuple[str, ...],
    resume: bool,
    overwrite: bool,
    force: bool,
    rewind_to: int | None,
    regenerate: bool,
) -> None:
    """Make the run's directory, as `run` does before it starts anything."""
    rewind = rewind_of(resume, overwrite, rewind_to, regenerate)
    from headway.deploy.recipe.resolve import load_recipe

    loaded = load_recipe(recipe, overrides)
    from headway.deploy.launch.local_run import LocalRun
    from headway.deploy.terminal import Terminal

    LocalRun(loaded, recipe, overrides, resume, overwrite, Terminal(), rewind, force).prepare()


@contextmanager
def printing_launcher(as_json: bool) -> "Iterator[Launcher]":
    """Yield a launcher whose commands are printed: each as it is given, or all at the end as one JSON object."""
    from headway.deploy.launch.base import Command, PrintedLauncher, as_builtins, as_text

    if not as_json:
        yield PrintedLauncher(lambda command: say(as_text(command)))
        return
    commands: list[Command] = []
    yield PrintedLauncher(commands.append)
    say_json({"commands": [as_builtins(command) for command in commands]})


@click.group(no_args_is_help=True)
def ray() -> None:
    """Put a run on a Ray cluster."""


@ray.command()
@run_arguments
@click.option(
    "--address",
    default="local",
    show_default=True,
    metavar="ADDRESS",
    help="local: start a Ray on this machine; auto: the Ray that runs here; or HOST:PORT of a cluster's head.",
)
def up(
    recipe: str,
    overrides: tuple[str, ...],
    address: str,
    resume: bool,
    overwrite: bool,
    force: bool,
    rewind_to: int | None,
    regenerate: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Run RECIPE with its learner and workers on the nodes of a Ray cluster.

    It is `headway run` with launcher.kind=ray: this process supervises the others, which Ray places. A worker whose
    node is gone starts again on another one. The run's directory lies on a file system that all nodes share.
    """
    rewind = rewind_of(resume, overwrite, rewind_to, regenerate)
    chosen = ("launcher.kind=ray", f"launcher.options.address={json.dumps(address)}")
    return execute(
        recipe, (*overrides, *chosen), resume, overwrite, rewind, is_forced=force, dry_run=dry_run, as_json=as_json
    )
