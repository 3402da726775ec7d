"""`headway`: the group of all commands, and how each of them ends: its exit code, and an error as one paragraph."""

import gc
import io
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence

import click

from headway.broker.errors import BUG_EXIT, HeadwayError, UnknownKeysError, UntrainableBatchError
from headway.broker.installation import shared_temporary_directory
from headway.deploy.launch.engine_preload import preload_engine
from headway.deploy.printing import complain, log_to_stderr, paragraph
from headway.learner.checkpoints.disk import system_fault

from .commands import data, launch, models, new, pages, ray, roles, run, runs, tools
from .ending import Ending

INTERRUPT_EXIT = 130
_NEW_OBJECTS = 50_000
"""New objects between two collections. Imported packages make millions that stay, and Python's 700 would examine them
again and again: a tenth of the time that torch and transformers take to import."""


def main() -> None:
    """Run `headway`. Every error is one paragraph on stderr; --debug, anywhere, adds the traceback."""
    ending = Ending()
    # a shell without job control starts what is in the background with SIGINT ignored, and so would nothing end at it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.set_threshold(_NEW_OBJECTS)
    sys.path.append(os.environ.get("HEADWAY_IMPORT_PATH", os.getcwd()))  # the user's own rewards and sources
    if not sys.stderr.isatty():  # in a log or a pipe, transformers' progress bars are noise
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    log_to_stderr()
    ending.exit(answer(sys.argv[1:]))


def answer(arguments: Sequence[str]) -> int:
    """Run the command, print its error if it fails, and return the exit code."""
    debug = "--debug" in arguments
    try:
        preload_engine()  # before the command's own modules are imported
        code = cli.main([each for each in arguments if each != "--debug"], prog_name="headway", standalone_mode=False)
    except click.ClickException as error:
        code = _correct(error)
    except (KeyboardInterrupt, click.Abort):
        code = INTERRUPT_EXIT
    except UntrainableBatchError as error:
        code = _complain(f"{error} {_traceback_of(error, debug)}", debug, error.exit_code)
    except UnknownKeysError as error:
        code = _complain(str(error), debug, error.exit_code, is_list=True)
    except HeadwayError as error:
        code = _complain(str(error), debug, error.exit_code)
    except Exception as error:  # noqa: BLE001 - the outermost edge: an error that is no HeadwayError is a bug
        fault = system_fault(error)
        code = _complain(fault, debug) if fault else _confess(error, debug)
    return code or 0


def _correct(error: click.ClickException) -> int:
    shown = io.StringIO()
    error.show(shown)
    complain(shown.getvalue().rstrip() + _hint(error))
    return error.exit_code


def _hint(error: click.ClickException) -> str:
    """Return what to add to click's words for mistakes that other programs teach."""
    if isinstance(error, click.NoSuchOption) and "." in error.option_name and _takes_keys(error.ctx):
        return f" Keys of a recipe are overridden without dashes: {error.option_name.lstrip('-')}=VALUE."
    if isinstance(error, click.MissingParameter) and getattr(error.param, "envvar", None) == "HEADWAY_BROKER":
        return " `headway broker` prints the line that sets it, for each role; `headway run RECIPE` needs none."
    return ""


def _takes_keys(context: click.Context | None) -> bool:
    return context is not None and any(one.name == "overrides" for one in context.command.params)


def _complain(message: str, debug: bool, exit_code: int = 1, *, is_list: bool = False) -> int:
    if debug:
        complain(traceback.format_exc().rstrip())
    first, *items = message.splitlines() if is_list else [message]
    complain("\n".join((paragraph(f"Error: {first}"), *(f"  {paragraph(item)}" for item in items))))
    return exit_code


def _confess(error: Exception, debug: bool) -> int:
    text = f"This is a bug in Headway, not a mistake of yours: {type(error).__name__}: {error}."
    _complain(f"{text} {_traceback_of(error, debug)}", debug)
    return BUG_EXIT


def _traceback_of(error: Exception, debug: bool) -> str:
    """Return the traceback, or where to find it."""
    if debug:
        return "The traceback is above."
    with tempfile.NamedTemporaryFile(
        "w",
        prefix="headway-bug-",
        suffix=".log",
        dir=shared_temporary_directory(),
        errors="backslashreplace",
        delete=False,
    ) as log:
        traceback.print_exception(error, file=log)
    return f"The traceback is in {log.name}; --debug shows it here."


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, no_args_is_help=True)
@click.version_option(package_name="headway", message="headway %(version)s")
@click.option("--debug", is_flag=True, help="Show a traceback with errors.")
def cli(debug: bool) -> None:
    """Headway: asynchronous reinforcement learning for language models.

    A first run, on a laptop: headway run arithmetic.yaml
    """


for command in (
    run.run,
    ray.ray,
    run.prepare,
    launch.launch,
    roles.broker,
    roles.learner,
    roles.workers,
    roles.worker,
    roles.scorers,
    roles.scorer,
    roles.sft,
    roles.train,
    roles.evaluate,
    roles.replay,
    models.export,
    models.generate,
    models.chat,
    runs.status,
    runs.top,
    runs.scale,
    runs.autoscale,
    runs.drain,
    runs.quarantine,
    runs.runs,
    pages.report,
    pages.compare,
    pages.dashboard,
    data.data,
    new.new,
    tools.acl,
    tools.algorithms,
    tools.plan_memory,
    tools.doctor,
    tools.metrics,
):
    cli.add_command(command)
