"""A test types each block of docs/elastic.md into its terminal as it stands, in the page's order.

The output that the page shows has to appear there; `...` stands for any text, and a number for any number unless the
page says `exactly`. The test replaces only the two ports, by free ones. Starting processes, which import torch, takes
most of its time.
"""

import json
import os
import re
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from headway.deploy.recipe.resolve import load_recipe
from tests.broker.topologies import free_port
from tests.end_to_end.records import check_trained, summary

from .pages import ROOT
from .shells import Shell

PAGE = ROOT / "docs" / "elastic.md"
PORTS = ("6380", "8420")
STEP = re.compile(
    r'^```(?P<language>\w+) title="(?P<title>[^"]*)"\n(?P<text>.*?)^```'
    r"|Press (?P<keys>\S+) in\sterminal (?P<terminal>\d)|Open <(?P<url>[^>]+)>"
    r"|Wait for\sthe\sprompts? in\sterminals? (?P<done>\d(?:[,\sand]+\d)*)",
    re.M | re.S,
)
KEYS = {"Ctrl-C": "\x03", "Ctrl-Z": "\x1a", "q": "q"}
NUMBER_OF_ANY_SIZE = r"(?>\d+(?:,\d+)*(?:\.\d+)?)"
VARYING = re.compile(rf"(\.\.\.|{NUMBER_OF_ANY_SIZE})")
TERMINALS = 5
DEADLINE_S = 600.0


class Step(NamedTuple):
    """An action or an expected output of the page."""

    kind: str
    """`type`, `press`, `wait` for the prompt, `expect`, `expect exactly` or `open`."""
    terminals: tuple[int, ...]
    text: str


def steps(page: str) -> Iterator[Step]:
    for found in STEP.finditer(page):
        if found["keys"]:
            yield Step("press", (int(found["terminal"]),), KEYS[found["keys"]])
        elif found["done"]:
            yield Step("wait", tuple(map(int, re.findall(r"\d", found["done"]))), "")
        elif found["url"]:
            yield Step("open", (), found["url"])
        else:
            number = re.search(r"\d", found["title"])
            terminals = (int(number[0]),) if number else tuple(range(1, TERMINALS + 1))
            expected = "expect exactly" if found["title"].endswith("exactly") else "expect"
            yield Step("type" if found["language"] == "sh" else expected, terminals, found["text"])


class Shape:
    """The output that a terminal should print: white space matches any white space, lines of `...` match any text.

    The parts between the lines of `...` follow one another. Each part is searched once, so that the search of a long
    output that lacks the last part stays fast.
    """

    def __init__(self, shown: str, *, exactly: bool) -> None:
        shown = re.sub(r"\A(\.\.\.\s)+|(\s\.\.\.)+\Z", "", shown.strip())
        parts = re.split(r"^\s*\.\.\.\s*$", shown, flags=re.M)
        self._parts = [re.compile(r"\s".join(_shape_of_word(word, exactly) for word in part.split())) for part in parts]

    def is_in(self, said: str) -> bool:
        said, begin = re.sub(r"\s+", lambda white: "\n" if "\n" in white[0] else " ", said), 0
        for part in self._parts:
            found = part.search(said, begin)
            if found is None:
                return False
            begin = found.end()
        return True

    def __str__(self) -> str:
        return "\n...\n".join(part.pattern for part in self._parts)


def _shape_of_word(word: str, exactly: bool) -> str:
    parts = VARYING.split(word)
    varying = [
        r"[^\n]*?" if part == "..." else re.escape(part) if exactly else NUMBER_OF_ANY_SIZE for part in parts[1::2]
    ]
    return "".join(re.escape(text) + part for text, part in zip(parts[::2], [*varying, ""], strict=True))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return a directory with the environment in which Headway is installed."""
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "tmp").mkdir()
    return tmp_path


@pytest.fixture
def shells(directory: Path) -> Iterator[dict[int, Shell]]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
    place = {"HOME": str(directory), "TMPDIR": str(directory / "tmp"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    opened: dict[int, Shell] = {}
    try:
        for number in range(1, TERMINALS + 1):
            opened[number] = Shell(f"terminal {number}", directory, {**inherited, **place}, DEADLINE_S)
        yield opened
    finally:
        for shell in opened.values():
            shell.close()


@pytest.mark.slow
def test_a_reader_scales_kills_and_resumes_a_run_by_the_page(shells: dict[int, Shell], directory: Path) -> None:
    page = PAGE.read_text()
    for port in PORTS:
        page = page.replace(port, str(free_port()))
    for step in steps(page):
        do(step, shells)
    assert [shell.wait_for_prompt() for shell in shells.values()] == [0] * TERMINALS
    walked, turns = (summary(directory / "runs" / name) for name in ("walk", "turns"))
    recipe = load_recipe("arithmetic-small.yaml")
    batch = recipe.learner.groups_per_step * recipe.learner.group_size
    check_trained(directory / "runs" / "walk", steps=walked["steps"], trajectories_per_step=batch, max_lag=4)
    assert turns["max_lag_seen"] == 0
    assert (directory / "runs" / "walk" / "report.html").stat().st_size > 10_000
    assert json.loads((directory / "grafana.json").read_text())["panels"]
    assert [process for shell in shells.values() for process in shell.running()] == []


def do(step: Step, shells: dict[int, Shell]) -> None:
    """Do one step of the page."""
    for shell in (shells[number] for number in step.terminals):
        match step.kind:
            case "type":
                shell.type(step.text)
            case "press":
                shell.press(step.text)
            case "wait":
                shell.wait_for_prompt()
            case _:
                shell.wait_for(Shape(step.text, exactly=step.kind == "expect exactly"))
    if step.kind == "open":
        with urllib.request.urlopen(step.text, timeout=240) as answer:
            assert answer.read().startswith(b"<!doctype html>")


def test_every_block_of_the_page_is_a_step() -> None:
    page = PAGE.read_text()
    blocks = [step for step in steps(page) if step.kind in ("type", "expect", "expect exactly")]
    assert len(blocks) * 2 == len(re.findall(r"^```", page, re.M))
    assert len(re.findall(r"[Pp]ress \S+ in\sterminal", page)) == sum(step.kind == "press" for step in steps(page))
