"""Options that several commands share, and which of them exclude each other."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

if TYPE_CHECKING:
    from headway.deploy.launch.commands import RunStart

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


@dataclass(frozen=True, kw_only=True)
class StartOptions:
    """The options that say where a run begins, as the user gave them."""

    resume: bool
    overwrite: bool
    force: bool
    rewind_to: int | None
    regenerate: bool

    def checked(self) -> "RunStart":
        """Return where the run begins. Raises UsageError for options that exclude or need each other."""
        if self.resume and self.overwrite:
            raise click.UsageError("--resume and --overwrite exclude each other.")
        if self.rewind_to is None and self.regenerate:
            raise click.UsageError("--regenerate needs --rewind-to.")
        if self.rewind_to is not None and not self.resume:
            raise click.UsageError("--rewind-to needs --resume.")
        from headway.deploy.launch.commands import RunStart
        from headway.learner.experience.log import Rewind

        rewind = None if self.rewind_to is None else Rewind(step=self.rewind_to, regenerate=self.regenerate)
        return RunStart(resume=self.resume, overwrite=self.overwrite, is_forced=self.force, rewind=rewind)


def start_options(command: F) -> F:
    """Add --resume, --overwrite, --force, --rewind-to and --regenerate, which the command gets as `start`."""

    @wraps(command)
    def with_start(**given: Any) -> Any:
        options = {name: given.pop(name) for name in StartOptions.__dataclass_fields__}
        return command(start=StartOptions(**options), **given)

    for option in reversed(_START_OPTIONS):
        with_start = option(with_start)
    return cast(F, with_start)


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
