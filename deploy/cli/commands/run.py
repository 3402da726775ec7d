"""`headway run`: a whole run on this machine."""

from typing import TYPE_CHECKING

import click

from deploy.printing import complain, say_json

from .options import beginning, of_a_run, overrides_argument, rewind_of

if TYPE_CHECKING:
    from learner.experience.rewind import Rewind


@click.command()
@of_a_run
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
) -> int:
    """Run a whole RECIPE on this machine.

    It starts a server, the stages before the learner, the learner and its workers. RECIPE is a YAML file or the
    name of one that ships. Ctrl-C drains, writes a checkpoint and stops; a second one stops at once.
    """
    rewind = rewind_of(resume, overwrite, rewind_to, regenerate)
    return execute(recipe, overrides, resume, overwrite, rewind, is_forced=force, dry_run=dry_run, as_json=as_json)


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
) -> int:
    """Run the recipe with the launcher that it names, and return the exit code."""
    from deploy.recipe.loading import hint_of, load_recipe

    loaded = load_recipe(recipe, overrides)
    if hint := hint_of(recipe):
        complain(hint)
    from deploy.launch.local import Local
    from deploy.launch.opening import open_launcher
    from deploy.run.report import read_summary
    from deploy.terminal import Terminal

    terminal = Terminal(stderr=as_json)
    if dry_run:
        from .dry_run import shown

        with shown(as_json) as launcher:
            return Local(loaded, recipe, overrides, resume, overwrite, terminal, rewind, is_forced, launcher).run()
    launcher = open_launcher(loaded.launcher)
    code = Local(loaded, recipe, overrides, resume, overwrite, terminal, rewind, is_forced, launcher).run()
    if as_json:
        say_json(read_summary(loaded.run_directory))
    return code


@click.command(hidden=True)
@click.argument("recipe")
@overrides_argument
@beginning
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
    from deploy.recipe.loading import load_recipe

    loaded = load_recipe(recipe, overrides)
    from deploy.launch.local import Local
    from deploy.terminal import Terminal

    Local(loaded, recipe, overrides, resume, overwrite, Terminal(), rewind, force).prepare()
