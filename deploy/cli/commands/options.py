"""Options that several commands have, and what of them excludes each other."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from learner.experience.rewind import Rewind

F = TypeVar("F", bound=Callable[..., Any])


def connection(command: F) -> F:
    """--broker and --run: which run a role joins."""
    command = click.option(
        "--run", "run", envvar="HEADWAY_RUN", show_envvar=True, required=True, help="The run's name."
    )(command)
    return click.option(
        "--broker",
        "url",
        envvar="HEADWAY_BROKER",
        show_envvar=True,
        required=True,
        help="redis://, rediss:// or unix://",
    )(command)


overrides_argument = click.argument("overrides", nargs=-1, metavar="[A.B=C]...")


def going_back(command: F) -> F:
    """--rewind-to and --regenerate, which `rewind_of` reads."""
    command = click.option(
        "--regenerate", is_flag=True, help="With --rewind-to: forget what was sampled since, and generate it anew."
    )(command)
    return click.option(
        "--rewind-to",
        type=click.IntRange(min=0),
        metavar="STEP",
        help="With --resume: go back to this checkpoint and train the logged batches since once more.",
    )(command)


def rewind_of(resume: bool, step: int | None, regenerate: bool) -> "Rewind | None":
    """What --rewind-to asks for. Raises UsageError without the options that it needs."""
    if step is None:
        if regenerate:
            raise click.UsageError("--regenerate needs --rewind-to.")
        return None
    if not resume:
        raise click.UsageError("--rewind-to needs --resume.")
    from learner.experience.rewind import Rewind

    return Rewind(step=step, regenerate=regenerate)


def refuse_both(resume: bool, overwrite: bool) -> None:
    """Raise UsageError for --resume with --overwrite."""
    if resume and overwrite:
        raise click.UsageError("--resume and --overwrite exclude each other.")


server_option = click.option(
    "--broker", "url", envvar="HEADWAY_BROKER", show_envvar=True, required=True, help="redis://, rediss://, unix://"
)
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object.")
allow_import_option = click.option(
    "--allow-import",
    "allowed",
    multiple=True,
    metavar="MODULE",
    help="Also import what the run's configuration names below MODULE, such as my_package.rewards. Repeat it for more."
    "  [always: Headway's own modules, and those in this directory]",
)
dry_run_option = click.option(
    "--dry-run", is_flag=True, help="Print the commands that would be started, in order; start and write nothing."
)
