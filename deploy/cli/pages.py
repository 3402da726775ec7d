"""The commands that show runs as an HTML page."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import click

from headway.broker.errors import HeadwayError
from headway.deploy.printing import complain, say, say_json

from .options import json_option

MOST_RUNS = 8
"""The page has so many colours."""


def distinct_runs(context: click.Context, parameter: click.Parameter, runs: tuple[str, ...]) -> tuple[str, ...]:
    """Return the runs. Raises UsageError for one alone, for too many, and for one that is named twice."""
    if not 2 <= len(runs) <= MOST_RUNS or len(set(runs)) < len(runs):
        raise click.BadParameter(f"give 2 to {MOST_RUNS} different runs.", context, parameter)
    return runs


@click.command()
@click.argument("run", metavar="[RUN]", required=False, envvar="HEADWAY_RUN")
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), help="The HTML file.  [default: report.html in RUN]"
)
@json_option
def report(run: str | None, output: Path | None, as_json: bool) -> None:
    """Write one HTML page that shows RUN: its figures, curves, lag, time, events and recipe.

    RUN is a run's directory or its name below ./runs, by default $HEADWAY_RUN, or else the run there that began or was
    resumed last; it may be running. The page needs no network. --json prints what the page shows, and writes it only
    with --output.
    """
    write_page([run or newest_run()], output, as_json=as_json)


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN RUN...", callback=distinct_runs)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The HTML file.  [default: compare.html in the first RUN]",
)
@json_option
def compare(runs: tuple[str, ...], output: Path | None, as_json: bool) -> None:
    """Write one HTML page that shows several runs side by side.

    It draws their curves over each other, and lists their summary figures and the settings that differ. RUN, --json and
    --output are those of `headway report`.
    """
    write_page(runs, output, as_json=as_json)


@click.command()
@click.argument("directory", metavar="[RUN]", required=False)
@click.option("--broker", "url", envvar="HEADWAY_BROKER", show_envvar=True, help="Default: that of RUN.")
@click.option("--run", "run", envvar="HEADWAY_RUN", show_envvar=True, help="The run's name at --broker.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Beyond loopback, the page's address has a token.")
@click.option("--port", type=click.IntRange(0, 65535), default=8420, show_default=True, help="0: any free port.")
@click.option("--json", "as_json", is_flag=True, help="Print the page's address as one JSON object.")
def dashboard(directory: str | None, url: str | None, run: str | None, host: str, port: int, as_json: bool) -> None:
    """Serve the page of a run, which follows it while it runs, until Ctrl-C.

    RUN is a run's directory or its name below ./runs, by default the newest one that runs; or name the server and the
    run by --broker and --run. The page shows what `headway report` and `headway status` show, and changes nothing.
    """
    if not as_json:
        complain("Loading, and looking for the run; its page's address follows ...")
    from headway.deploy.observe.page.live_page import PageServer, Watcher
    from headway.deploy.roles.run_client import find_source

    source = find_source(directory, url, run)
    with Watcher(source.connect, source.read) as watcher, PageServer(watcher, host, port) as server:
        if as_json:
            say_json({"url": server.url, "token": server.token or None}, in_one_line=True)
        else:
            say(f"Dashboard: {server.url}  (Ctrl-C ends it)")
        with suppress(KeyboardInterrupt):
            server.serve_forever()


def write_page(runs: Sequence[str], output: Path | None, *, as_json: bool) -> None:
    """Write the page of these runs, into the directory of the first unless `output` is given, or print what it would
    show. Raises HeadwayError."""
    from headway.deploy.observe.page.content import document, page_of
    from headway.deploy.run.record import read_record
    from headway.deploy.run.run_directory import COMPARISON, REPORT
    from headway.learner.disk import replace_file

    records = [read_record(run) for run in runs]
    page = page_of(records)
    if as_json and output is None:
        say_json(page)
        return
    path = output or records[0].directory / (COMPARISON if len(runs) > 1 else REPORT)
    try:
        replace_file(path, document(page, page.title))
    except HeadwayError as error:
        raise HeadwayError(f"{error} The page may lie elsewhere: --output FILE.") from error
    if as_json:
        say_json(page)
    else:
        say(f"Page: {path}")


def newest_run() -> str:
    """Return the run below ./runs that began or was resumed last, and say which one it is. Raises HeadwayError."""
    from headway.deploy.run.run_directory import find_newest

    directory = find_newest(Path("runs"))
    complain(f"No RUN is named: this is the newest, {directory}.")
    return str(directory)
