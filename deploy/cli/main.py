"""The command line. Thin: parse first, import what the command needs after: `--help` answers at once."""

import io
import logging
import math
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from broker.errors import HeadwayError, UntrainableBatchError
from deploy.printing import OF_ROLES, complain, log_to_stderr, paragraph, say_json
from learner.checkpoints.disk import FULL

from .ending import Ending

if TYPE_CHECKING:
    from learner.experience.rewind import Rewind

F = TypeVar("F", bound=Callable[..., Any])
BUG_EXIT, INTERRUPT_EXIT = 70, 130
DEFAULT_PORT = 6380


def main() -> None:
    """`headway`. Every error is one paragraph on stderr; --debug, anywhere, adds the traceback."""
    ending = Ending()
    sys.path.append(os.environ.get("HEADWAY_IMPORT_PATH", os.getcwd()))  # rewards and sources of the user's own
    if not sys.stderr.isatty():  # in a log or a pipe, transformers' progress bars are noise
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    log_to_stderr()
    ending.exit(answer(sys.argv[1:]))


def answer(arguments: Sequence[str]) -> int:
    """Do what the command line says, and tell what went wrong; the exit code."""
    debug = "--debug" in arguments
    try:
        code = cli.main([each for each in arguments if each != "--debug"], prog_name="headway", standalone_mode=False)
    except click.ClickException as error:
        code = _correct(error)
    except (KeyboardInterrupt, click.Abort):
        code = INTERRUPT_EXIT
    except UntrainableBatchError as error:
        code = _complain(f"{error} {_traceback_of(error, debug)}", debug, error.exit_code)
    except HeadwayError as error:
        code = _complain(str(error), debug, error.exit_code)
    except OSError as error:
        code = _complain(f"{error}. Make room.", debug) if error.errno in FULL else _confess(error, debug)
    except Exception as error:  # noqa: BLE001 - the outermost edge: what is no HeadwayError is a bug of ours
        code = _confess(error, debug)
    return code or 0


def _correct(error: click.ClickException) -> int:
    shown = io.StringIO()
    error.show(shown)
    complain(shown.getvalue().rstrip())
    return error.exit_code


def _complain(message: str, debug: bool, exit_code: int = 1) -> int:
    if debug:
        complain(traceback.format_exc().rstrip())
    complain(paragraph(f"Error: {message}"))
    return exit_code


def _confess(error: Exception, debug: bool) -> int:
    text = f"This is a bug in Headway, not a mistake of yours: {type(error).__name__}: {error}."
    _complain(f"{text} {_traceback_of(error, debug)}", debug)
    return BUG_EXIT


def _traceback_of(error: Exception, debug: bool) -> str:
    """Where it is to be found."""
    if debug:
        return "The traceback is above."
    with tempfile.NamedTemporaryFile(
        "w", prefix="headway-bug-", suffix=".log", errors="backslashreplace", delete=False
    ) as log:
        traceback.print_exception(error, file=log)
    return f"The traceback is in {log.name}; --debug shows it here."


def _connection(command: F) -> F:
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


def _going_back(command: F) -> F:
    command = click.option(
        "--regenerate", is_flag=True, help="With --rewind-to: forget what was sampled since, and generate it anew."
    )(command)
    return click.option(
        "--rewind-to",
        type=click.IntRange(min=0),
        metavar="STEP",
        help="With --resume: go back to this checkpoint and train the logged batches since once more.",
    )(command)


def _rewind(resume: bool, step: int | None, regenerate: bool) -> "Rewind | None":
    if step is None:
        if regenerate:
            raise click.UsageError("--regenerate needs --rewind-to.")
        return None
    if not resume:
        raise click.UsageError("--rewind-to needs --resume.")
    from learner.experience.rewind import Rewind

    return Rewind(step=step, regenerate=regenerate)


def _refuse_both(resume: bool, overwrite: bool) -> None:
    if resume and overwrite:
        raise click.UsageError("--resume and --overwrite exclude each other.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, no_args_is_help=True)
@click.version_option(package_name="headway", message="headway %(version)s")
@click.option("--debug", is_flag=True, help="Show a traceback with errors.")
def cli(debug: bool) -> None:
    """Headway: asynchronous reinforcement learning for language models.

    A first run, on a laptop: headway run arithmetic.yaml
    """


@cli.command()
@click.argument("recipe")
@overrides_argument
@click.option("--resume", is_flag=True, help="Go on from the run's last checkpoint.")
@click.option("--overwrite", is_flag=True, help="Start anew and lose what the run's directory holds.")
@click.option("--force", is_flag=True, help="With --overwrite: even if the run is in use.")
@_going_back
@click.option("--json", "as_json", is_flag=True, help="Print summary.json at the end; progress goes to stderr.")
def run(
    recipe: str,
    overrides: tuple[str, ...],
    resume: bool,
    overwrite: bool,
    force: bool,
    rewind_to: int | None,
    regenerate: bool,
    as_json: bool,
) -> int:
    """Run a whole RECIPE on this machine.

    That is a server, the warm-up, the learner and its workers. RECIPE is a YAML file or the name of one that
    ships. Ctrl-C drains, writes a checkpoint and stops; a second one stops at once.
    """
    _refuse_both(resume, overwrite)
    rewind = _rewind(resume, rewind_to, regenerate)
    from deploy.recipe.loading import load_recipe

    loaded = load_recipe(recipe, overrides)
    from deploy.launch.local import Local
    from deploy.run.report import read_summary
    from deploy.terminal import Terminal

    code = Local(loaded, recipe, overrides, resume, overwrite, Terminal(stderr=as_json), rewind, force).run()
    if as_json:
        say_json(read_summary(loaded.run_directory))
    return code


@cli.command()
@click.option("--directory", type=click.Path(path_type=Path), default=Path("broker-data"), help="Where its data live.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=DEFAULT_PORT,
    show_default=True,
    help="On 127.0.0.1; 0: a unix socket instead.",
)
@click.option("--url", help="Start nothing; check the server that runs there.")
def broker(directory: Path, port: int, url: str | None) -> int:
    """Run the embedded server alone, or check your own Redis or Valkey."""
    from deploy.roles.server import check_server, run_server

    return check_server(url) if url else run_server(directory, port or None)


@cli.command()
@click.argument("recipe")
@overrides_argument
@_connection
@click.option("--resume", is_flag=True, help="Go on from the run's last checkpoint.")
@click.option("--overwrite", is_flag=True, help="Start anew and lose what the run's directory holds.")
@click.option("--force", is_flag=True, help="With --overwrite: even if the run is in use.")
@_going_back
@click.option("--processes", type=click.IntRange(min=1), help="Ranks on this machine: learner.processes.")
@click.option("--prepared", is_flag=True, hidden=True, help="A supervisor has made the run's directory.")
def learner(
    recipe: str,
    overrides: tuple[str, ...],
    url: str,
    run: str,
    resume: bool,
    overwrite: bool,
    force: bool,
    rewind_to: int | None,
    regenerate: bool,
    processes: int | None,
    prepared: bool,
) -> int:
    """Run the learner alone.

    It hands RECIPE, resolved, to the workers through the broker.
    """
    from deploy.recipe.loading import load_recipe

    _refuse_both(resume, overwrite)
    rewind = _rewind(resume, rewind_to, regenerate)
    _log_to_stderr()
    ranks = (f"learner.processes={processes}",) if processes else ()
    loaded = load_recipe(recipe, (*overrides, f"run.name='{run}'", *ranks))
    from deploy.roles.alone import run_learner

    return run_learner(
        loaded, url, resume=resume, overwrite=overwrite, prepared=prepared, rewind=rewind, is_forced=force
    )


_allow_import = click.option(
    "--allow-import",
    "allowed",
    multiple=True,
    metavar="MODULE",
    help="Also import what the run's configuration names below MODULE, such as my_package.rewards. Repeat it for more."
    "  [always: Headway's own modules, and those in this directory]",
)


@cli.command()
@overrides_argument
@_connection
@_allow_import
@click.option("--count", type=click.IntRange(1, 1024), default=1, show_default=True, help="Worker processes.")
def workers(overrides: tuple[str, ...], url: str, run: str, allowed: tuple[str, ...], count: int) -> int:
    """Run COUNT workers.

    All but engine.*, weights.follow, weights.archive and weights.pull_bytes_per_s is taken from the run's own
    configuration, which the broker holds. Workers may start before the learner, and leave and join while it trains.
    Ctrl-C hands their work back and stops.
    """
    from deploy.roles.alone import run_workers

    return run_workers(url, run, count, overrides, allowed)


@cli.command(hidden=True)
@overrides_argument
@_connection
@_allow_import
@click.option("--name", default="worker", help="Its name in logs and tables; made unique.")
def worker(overrides: tuple[str, ...], url: str, run: str, allowed: tuple[str, ...], name: str) -> None:
    """One worker in this process, as `run` and `workers` start it."""
    _log_to_stderr()
    from deploy.roles.alone import run_worker

    run_worker(url, run, name, overrides, allowed)


@cli.command()
@click.option(
    "--broker", "url", envvar="HEADWAY_BROKER", show_envvar=True, help="Default: the newest run below ./runs."
)
@click.option("--run", "run", envvar="HEADWAY_RUN", show_envvar=True, help="The run's name.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--watch", is_flag=True, help="Look again every second, until Ctrl-C; with --json, a line each.")
def status(url: str | None, run: str | None, as_json: bool, watch: bool) -> None:
    """Show a run's versions, queues, workers, lag and throughput."""
    from deploy.roles.alone import show_status

    show_status(url, run, as_json=as_json, watch=watch)


_server = click.option(
    "--broker", "url", envvar="HEADWAY_BROKER", show_envvar=True, required=True, help="redis://, rediss://, unix://"
)
_as_json = click.option("--json", "as_json", is_flag=True, help="One JSON object.")


@cli.group()
def runs() -> None:
    """List, show and delete the runs that a broker holds."""


@runs.command("list")
@_server
@click.option("--json", "as_json", is_flag=True, help="A JSON array.")
def list_runs(url: str, as_json: bool) -> None:
    """A line for every run: state, weights, reward, workers, bytes, and how long nobody has used it."""
    from .runs import list_runs

    list_runs(url, as_json=as_json)


@runs.command("show")
@click.argument("run")
@_server
@_as_json
def show_run(run: str, url: str, as_json: bool) -> None:
    """Everything about RUN."""
    from .runs import show_run

    show_run(url, run, as_json=as_json)


@runs.command("delete")
@click.argument("run")
@_server
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--force", is_flag=True, help="Even if it is in use.")
@_as_json
def delete_run(run: str, url: str, yes: bool, force: bool, as_json: bool) -> None:
    """Remove RUN from the broker. What it wrote to disks (checkpoints, logs) stays."""
    from .runs import delete_run

    def confirm(question: str) -> None:
        if not yes:
            click.confirm(question, abort=True, err=True)

    delete_run(url, run, is_forced=force, as_json=as_json, confirm=confirm)


@cli.command()
@click.option("--run", help="Users for this run only.  [default: for all runs]")
@click.option(
    "--passwords",
    type=click.Path(path_type=Path),
    help="YAML that maps learner, worker and observer to passwords.  [default: new ones, shown on stderr]",
)
@click.option("--aclfile", "as_file", is_flag=True, help="Lines for the server's aclfile instead of commands.")
@click.option("--redis-7.0", "is_for_7_0", is_flag=True, help="Leave out what Redis 7.0 does not know.")
def acl(run: str | None, passwords: Path | None, as_file: bool, is_for_7_0: bool) -> None:
    """Print the server's rules for a user per role: learner, worker, observer.

    Pipe them into `valkey-cli` or `redis-cli`. The default user stays as it is; switch it off once
    these work. Then give each role a URL such as redis://headway-worker@host:6379?password_file=FILE, or its
    password in HEADWAY_BROKER_PASSWORD.
    """
    from .acl import print_acl

    print_acl(run, passwords, as_file=as_file, is_for_7_0=is_for_7_0)


@cli.command()
@click.argument("recipe")
@overrides_argument
@click.option("--output", type=click.Path(path_type=Path), help="Directory of the model.  [default: runs/NAME/sft]")
def sft(recipe: str, overrides: tuple[str, ...], output: Path | None) -> int:
    """Run the supervised warm-up of RECIPE alone."""
    from deploy.recipe.loading import load_recipe

    loaded = load_recipe(recipe, overrides)
    from deploy.roles.alone import run_sft

    directory = output or loaded.run_directory / "sft"
    return run_sft(loaded, directory, (recipe, *overrides, "--output", str(directory)))


@cli.command("eval")
@click.argument("recipe")
@overrides_argument
@click.option("--checkpoint", type=click.Path(path_type=Path), required=True, help="A model's directory.")
@click.option("--prompts", type=click.IntRange(min=1), help="Held-out prompts.  [default: evaluation.prompts]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def evaluate(recipe: str, overrides: tuple[str, ...], checkpoint: Path, prompts: int | None, as_json: bool) -> None:
    """Measure a model's pass rate on the held-out prompts of RECIPE."""
    from deploy.recipe.loading import load_recipe

    loaded = load_recipe(recipe, overrides)
    from deploy.roles.alone import run_eval

    run_eval(loaded, checkpoint, prompts, as_json=as_json)


@cli.command()
@click.argument("run")
@overrides_argument
@click.option("--algorithm", "preset", help="Train with this preset's loss instead: grpo, gspo, tis, ...")
@click.option(
    "--from",
    "first_step",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Start from this checkpoint; 0: from the first weights.",
)
@click.option("--steps", type=click.IntRange(min=1), help="Replay so many steps.  [default: all that were logged]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def replay(
    run: str, overrides: tuple[str, ...], preset: str | None, first_step: int, steps: int | None, as_json: bool
) -> int:
    """Train RUN's learner over again from its experience log, and compare.

    Offline, in one process: no broker, no workers, the same batches in the same order. RUN is a name below
    ./runs or a directory. With the run's own settings the result is the same to the last bit, else the exit
    code is 1; with another loss it shows what that would have made of the same experience.
    """
    _log_to_stderr()
    from deploy.roles.alone import run_replay

    return run_replay(run, preset, overrides, first_step=first_step, steps=steps, as_json=as_json)


@cli.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def algorithms(name: str | None, as_json: bool) -> None:
    """Show what losses there are: equations, defaults, sources.

    With NAME one preset or one function in full.
    """
    from deploy.terminal import Terminal
    from learner.objective.catalog import compositions, find, functions

    from .algorithm_pages import overview, page

    if as_json:
        found = find(name) if name else [*compositions(), *functions()]
        say_json({"algorithms": found})
        return
    for shown in [page(one) for one in find(name)] if name else [overview()]:
        Terminal().print(shown)


def _finite(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is given; expected a finite number.", context, parameter)
    return value


@cli.command("plan-memory")
@click.argument("recipe")
@overrides_argument
@click.option(
    "--device-memory",
    type=click.FloatRange(min=0),
    callback=_finite,
    metavar="GB",
    help="Say what fits a device of this size.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def plan_memory(recipe: str, overrides: tuple[str, ...], device_memory: float | None, as_json: bool) -> int:
    """Show what each rank of RECIPE's learner will hold, before anything starts.

    Neither weights nor a GPU are needed. The exit code is 1 if --device-memory is too little.
    """
    from deploy.recipe.loading import load_recipe
    from deploy.terminal import Terminal

    from .memory_pages import as_builtins, page, report

    found = report(load_recipe(recipe, overrides), device_memory)
    if as_json:
        say_json(as_builtins(found))
    else:
        Terminal().print(page(found))
    return int(found.fits is False)


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def doctor(as_json: bool) -> None:
    """Show what will work on this machine.

    And what is installed, and what to install for the rest.
    """
    from deploy.terminal import Terminal

    from .doctor import examine, report_tables

    report = examine()
    if as_json:
        say_json(report)
        return
    Terminal().print(report_tables(report))


def _log_to_stderr() -> None:
    """A role tells its log, or the terminal that it has for itself, what it does."""
    log_to_stderr(logging.INFO, OF_ROLES)
