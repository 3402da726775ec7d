"""Options that several commands share, and which of them exclude each other."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from headway.learner.experience.log import Rewind

F = TypeVar("F", bound=Callable[..., Any])


def connection_options(command: F) -> F:
    """Add --broker and --run: the run that a role joins."""
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


_START_OPTIONS = (
    click.option("--resume", is_flag=True, help="Go on from the run's last checkpoint."),
    click.option("--overwrite", is_flag=True, help="Start anew and lose what the run's directory holds."),
    click.option("--force", is_flag=True, help="With --overwrite: even if the run is in use."),
    click.option(
        "--rewind-to",
        type=click.IntRange(min=0),
        metavar="STEP",
        help="With --resume: go back to this checkpoint and train the logged batches since once more.",
    ),
    click.option(
        "--regenerate", is_flag=True, help="With --rewind-to: forget what was sampled since, and generate it anew."
    ),
)


def start_options(command: F) -> F:
    """Add --resume, --overwrite, --force, --rewind-to and --regenerate: where a run begins; see `rewind_of`."""
    for option in reversed(_START_OPTIONS):
        command = option(command)
    return command


def rewind_of(resume: bool, overwrite: bool, step: int | None, regenerate: bool) -> "Rewind | None":
    """Return what --rewind-to asks for. Raises UsageError for options that exclude or need each other."""
    if resume and overwrite:
        raise click.UsageError("--resume and --overwrite exclude each other.")
    if step is None:
        if regenerate:
            raise click.UsageError("--regenerate needs --rewind-to.")
        return None
    if not resume:
        raise click.UsageError("--rewind-to needs --resume.")
    from headway.learner.experience.log import Rewind

    return Rewind(step=step, regenerate=regenerate)


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


def run_arguments(command: F) -> F:
    """RECIPE, overrides, from where the run begins, --dry-run and --json: what `run` and `ray up` have in common."""
    as_json = click.option(
        "--json",
        "as_json",
        is_flag=True,
        help="Print summary.json at the end; progress goes to stderr. With --dry-run: the commands.",
    )
    return click.argument("recipe")(overrides_argument(start_options(dry_run_option(as_json(command)))))
