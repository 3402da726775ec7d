"""A test executes every block of commands or of a recipe in README and docs, or the block says what it needs.

The HTML comment above a block says which: `<!-- test: FILE, ... -->` names the tests that execute its commands,
`<!-- needs: ... -->` the means that no test has, `<!-- recipe -->` a recipe that is loaded here, `<!-- walk -->` that
test_walk.py types the block into a terminal as it stands. Blocks of plain text are marked `text`. The tests here parse
the `headway` lines of every block, and put its overrides on the recipe.
"""

import re
import shlex
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from headway.deploy.cli.main import cli
from headway.deploy.recipe.resolve import load_recipe

from .pages import ROOT, markdown_pages, whole_recipe

BLOCK = re.compile(r"(?:<!-- ([^\n]*) -->\n)?^```(\w*)(?: title=[^\n]*)?\n(.*?)^```", re.M | re.S)
WALK = ROOT / "docs" / "elastic.md"
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
RECIPE_COMMANDS = ("run", "learner", "sft", "plan-memory", "eval")


class Block(NamedTuple):
    page: Path
    mark: str
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.text.splitlines()[0][:60]}"


def blocks() -> list[Block]:
    """Return all fenced blocks that are not plain text."""
    found = [
        Block(page, *match.groups(default=""))
        for page in markdown_pages()
        for match in BLOCK.finditer(page.read_text())
    ]
    return [block for block in found if block.language != "text"]


def lines(program: str, among: list[Block] | None = None) -> Iterator[list[str]]:
    """Yield the words of every line that calls the program, in all blocks or in those of `among`.

    Comments are left out, and so is the part that redirects the output.
    """
    for block in among or blocks():
        if block.language != "sh":
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words and words[0].rsplit("/")[-1] == program:
                yield list(takewhile(lambda word: word not in (">", "2>", "|"), words[1:]))


def test_every_block_is_executed_or_says_what_it_needs() -> None:
    marks = ("test: ", "needs: ", "recipe")
    assert not [
        str(block)
        for block in blocks()
        if not (block.mark.startswith(marks) or (block.mark == "walk" and block.page == WALK))
    ]


def test_every_test_that_a_block_names_exists() -> None:
    named = {
        name.strip() for block in blocks() if block.mark.startswith("test: ") for name in block.mark[6:].split(",")
    }
    assert len(named) > 5
    assert not [name for name in named if not (ROOT / name).is_file()]


def test_the_tests_that_a_block_names_call_its_commands() -> None:
    silent = []
    for block in blocks():
        if not block.mark.startswith("test: "):
            continue
        tests = "".join((ROOT / name.strip()).read_text() for name in block.mark[6:].split(","))
        silent += [f"{block}: {words[0]}" for words in lines("headway", [block]) if not _calls(tests, words[0])]
        targets = {word for words in lines("make", [block]) for word in words if word in TARGETS}
        silent += [f"{block}: make {target}" for target in targets if f'"make", "{target}"' not in tests]
    assert not silent


@pytest.mark.parametrize("block", [block for block in blocks() if block.mark == "recipe"], ids=str)
def test_a_recipe_in_a_page_loads(block: Block, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(whole_recipe(block.text))
    assert load_recipe(tmp_path / "own.yaml").run.name == "own"


def test_every_headway_line_is_one_that_the_command_line_takes() -> None:
    found = list(lines("headway"))
    assert len(found) > 25
    for words in found:
        command, rest = _command(words)
        command.make_context("headway", [*rest, *_connection(command, rest)], resilient_parsing=False)


def test_every_override_is_one_that_the_recipe_takes() -> None:
    found = [words for words in lines("headway") if words[0] in RECIPE_COMMANDS and words[1].endswith(".yaml")]
    assert len(found) > 8
    for _, recipe, *rest in found:
        overrides = [word for word in rest if re.match(r"(base|[a-z_]+\.[a-z_.]+)=", word)]
        is_the_readers = Path(recipe).name in ("config.yaml", "own.yaml", "recipe.yaml")
        load_recipe("arithmetic.yaml" if is_the_readers else recipe, overrides)


def test_every_make_line_names_a_target() -> None:
    found = list(lines("make"))
    assert len(found) > 5
    assert not [words for words in found if not TARGETS & set(words)]


def _calls(tests: str, command: str) -> bool:
    """Whether the text of tests has the command as a word of a command line, or calls the command's function."""
    return re.search(rf"[\"' ]{command}[\"' ]|\b{command}\(", tests) is not None


def _command(words: list[str]) -> tuple[click.Command, list[str]]:
    command: click.Command = cli
    while isinstance(command, click.Group):
        command, words = command.commands[words[0]], words[1:]
    return command, words


def _connection(command: click.Command, words: list[str]) -> list[str]:
    """Return the options that a terminal's environment would give to the command."""
    values = {"--broker": "redis://host", "--run": "first"}
    missing = {flag for option in command.params if option.required for flag in option.opts if flag in values}
    return [word for flag in sorted(missing - set(words)) for word in (flag, values[flag])]
