"""`headway`: the group of all commands, and how each of them ends: its exit code, and an error as one paragraph.

`ProcessExit` ends a process as Python does, but does not finalize the interpreter. Libraries have threads that cannot
be joined: gloo's threads serve a group as long as any object holds it, and torch's caches hold groups for good. Such a
thread needs the interpreter to release a tensor or to return from a long call. If Python finalizes the interpreter
meanwhile, it ends the thread in the midst of C++ code that does not allow it, and the process aborts with "terminate
called without an active exception" although its work is done.
"""

import atexit
import gc
import io
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import NoReturn

import click

from headway.broker.errors import BUG_EXIT, HeadwayError, UnknownKeysError, UntrainableBatchError
from headway.broker.installation import shared_temporary_directory
from headway.deploy.launch.engine_preload import preload_engine
from headway.deploy.printing import complain, log_to_stderr, paragraph
from headway.learner.disk import system_fault

from . import data, models, pages, roles, run, runs, tools, trajectories

INTERRUPT_EXIT = 130
_NEW_OBJECTS = 50_000
"""New objects between two collections. Imported packages make millions that stay, and Python's 700 would examine them
again and again: a tenth of the time that torch and transformers take to import."""


def main() -> None:
    """Run `headway`. Every error is one paragraph on stderr; --debug, anywhere, adds the traceback."""
    process_exit = ProcessExit()
    # a shell without job control starts what is in the background with SIGINT ignored, and so would nothing end at it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.set_threshold(_NEW_OBJECTS)
    sys.path.append(os.environ.get("HEADWAY_IMPORT_PATH", os.getcwd()))  # the user's own rewards and sources
    if not sys.stderr.isatty():  # in a log or a pipe, transformers' progress bars are noise
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    log_to_stderr()
    process_exit.exit(answer(sys.argv[1:]))


def answer(arguments: Sequence[str]) -> int:
    """Run the command, print its error if it fails, and return the exit code."""
    debug = "--debug" in arguments
    try:
        preload_engine()  # before the command's own modules are imported
        code = cli.main([each for each in arguments if each != "--debug"], prog_name="headway", standalone_mode=False)
    except click.ClickException as error:
        code = _report_usage_error(error)
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
        code = _complain(fault, debug) if fault else _report_bug(error, debug)
    return code or 0


def _report_usage_error(error: click.ClickException) -> int:
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


def _report_bug(error: Exception, debug: bool) -> int:
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
    run.ray,
    run.prepare,
    run.launch,
    roles.broker,
    roles.learner,
    roles.workers,
    roles.worker,
    roles.gateway,
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
    trajectories.trajectories,
    tools.new,
    tools.acl,
    tools.algorithms,
    tools.plan_memory,
    tools.doctor,
    tools.metrics,
):
    cli.add_command(command)


class ProcessExit:
    """Ends the process. Make one before any library registers with atexit: what is registered first is called last."""

    def __init__(self) -> None:
        self._code: int | None = None
        atexit.register(self._leave)

    def exit(self, code: int) -> NoReturn:
        """Exit as `sys.exit` does: threads are joined and all atexit functions are called."""
        self._code = code
        sys.exit(code)

    def _leave(self) -> None:
        if self._code is None:
            return  # an uncaught error: Python has its own code for it
        try:
            for stream in filter(None, (sys.stdout, sys.stderr)):
                stream.flush()
        except OSError:
            return  # Python finds the same error and reports it
        os._exit(self._code)
