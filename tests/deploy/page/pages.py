"""A run's directory that a page shows, and the elements of an HTML page."""

from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

from click.testing import CliRunner

from headway.deploy.cli.main import cli
from headway.deploy.recipe.resolve import dump_recipe, load_recipe
from headway.deploy.run.record import summarize
from tests.deploy.runs import write_resumed_run


class Elements(HTMLParser):
    """The elements of a document, and the text of the elements that scripts read."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.tags = Counter[str]()
        self.links: list[str] = []
        self.texts: dict[str, str] = {}
        self._open = ""
        self.feed(document)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.links += [value or "" for name, value in attributes if name in ("src", "href")]
        self._open = dict(attributes).get("id") or tag

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        self.texts[self._open] = self.texts.get(self._open, "") + data


def headway(*arguments: str) -> str:
    """Run the command and return its output. Raises the command's exceptions."""
    answer = CliRunner(env={"COLUMNS": "200"}).invoke(cli, arguments, standalone_mode=False)
    if answer.exception is not None:
        raise answer.exception
    return answer.stdout


def write_run(directory: Path, *overrides: str) -> Path:
    """Write a run of five steps, killed after the fourth and resumed at step 3; its learner wrote the summary."""
    directory.mkdir(parents=True)
    recipe = load_recipe("arithmetic.yaml", ("broker.url=redis://me:secret@host:1", *overrides))
    (directory / "config.yaml").write_text(dump_recipe(recipe))
    write_resumed_run(directory)
    summarize(directory, {"max_lag_allowed": 2, "worker_restarts": 3})
    return directory
