"""`headway report` and `headway compare`: a page of runs, as a file or as JSON."""

from collections.abc import Sequence
from pathlib import Path

from headway.broker.errors import HeadwayError
from headway.deploy.observe.page.document import document
from headway.deploy.observe.page.picture import page_of
from headway.deploy.printing import complain, say, say_json
from headway.deploy.run.atomic_files import replace_file
from headway.deploy.run.directory import COMPARISON, REPORT, find_newest
from headway.deploy.run.record import read_record


def write_page(runs: Sequence[str], output: Path | None, *, as_json: bool) -> None:
    """Write the page of these runs, into the directory of the first unless `output` is given, or print what it would
    show. Raises HeadwayError."""
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


def newest() -> str:
    """Return the run below ./runs that began or was resumed last, and say which one it is. Raises HeadwayError."""
    directory = find_newest(Path("runs"))
    complain(f"No RUN is named: this is the newest, {directory}.")
    return str(directory)
