"""Tables on narrow terminals: no word is cut, whatever the names of workers, hosts and runs are."""

import io
import re
from collections.abc import Collection
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table

from headway.broker.client.supervision import RunUsage
from headway.broker.schema import WeightVersion
from headway.broker.schema.status import DeadLetter, PoolInfo, RunStatus, Tallies
from headway.deploy.cli.memory_report import page, report
from headway.deploy.observe.bottleneck import Bottleneck
from headway.deploy.observe.status_tables import status_json, status_tables
from headway.deploy.recipe.resolve import load_recipe
from headway.deploy.roles.run_client import _runs_table
from headway.deploy.terminal import Terminal, WordWrapTable

from .runs import run_status, step_metrics, worker
from .test_plan_memory import RECIPE

NAMES = ("training-node-0017-rollouts-worker-12-ab12", "vm-worker-0-c197")
RUN = "smollm2-reasoning-gym-2026-11-23-learning-rate-5e-4"
WORD = re.compile(r"[^\s,─━]+")


def text_of(content: RenderableType, width: int) -> str:
    console = Terminal(width=width, record=True, file=io.StringIO())
    console.print(content)
    return console.export_text()


def assert_whole(content: RenderableType, width: int, only_wide: Collection[str] = ()) -> None:
    """Assert that the narrow terminal has every word of the wide one, except these, and is never too narrow."""
    narrow = text_of(content, width)
    assert max(map(len, narrow.splitlines())) <= width
    assert "…" not in narrow
    assert set(WORD.findall(text_of(content, 1000))) - set(WORD.findall(narrow)) - set(only_wide) == set()


def status() -> RunStatus:
    letter = DeadLetter(tid="0000-00000007:0:3", worker=NAMES[0], reason="token id 999999 is no id of the vocabulary")
    return replace(
        run_status(),
        run=RUN,
        workers=tuple(worker(name, WeightVersion(1, 37), last_error="[Errno 111] refused") for name in NAMES),
        pools=(PoolInfo(pool="training-node-0017-4711", host="training-node-0017.example", pid=1, running=3),),
        tallies=Tallies(dispatched_by_prompt_length={16: 20}, trained_by_prompt_length={16: 10}),
        dead_letters=(letter,),
        quarantined=NAMES,
    )


@pytest.mark.parametrize("width", [80, 60])
def test_status_keeps_words_whole(width: int) -> None:
    waiting = Bottleneck(who="learner", why="groups", text=f"It waits for {NAMES[0]}. " * 3, is_quiet=True, quiet_s=1.0)
    assert_whole(status_tables(status(), waiting), width)
    assert_whole(status_tables(run_status()), width)
    assert_whole(status_tables(run_status()), 90, only_wide=("host", "pid", "node", "4711"))


def test_status_shows_the_process_of_each_worker_where_there_is_room() -> None:
    tables = status_tables(run_status())
    wide = [line.split()[:3] for line in text_of(tables, 120).splitlines()]
    assert [line for line in wide if line[1:] in (["host", "pid"], ["node", "4711"])] == [
        ["worker", "host", "pid"],
        ["node-worker-0-ab12", "node", "4711"],
        ["node-worker-1-cd34", "node", "4711"],
    ]
    assert "4711" not in text_of(tables, 90)
    assert [(worker["host"], worker["pid"]) for worker in status_json(run_status())["workers"]] == [("node", 4711)] * 2


@pytest.mark.parametrize("width", [80, 60])
def test_plan_memory_keeps_words_whole(width: int, tmp_path: Path) -> None:
    recipe = tmp_path / "planned.yaml"
    recipe.write_text(RECIPE)
    assert_whole(page(report(load_recipe(recipe), 0.5)), width)


@pytest.mark.parametrize("width", [80, 60])
def test_runs_list_keeps_words_whole(width: int) -> None:
    usage = RunUsage(
        run=RUN,
        state="training",
        incarnation=3,
        announced=WeightVersion(3, 1200),
        last_step=step_metrics(1199, total_steps=20_000),
        workers=128,
        payload_bytes=12_345_678_901,
        idle_s=7000,
    )
    assert_whole(_runs_table([usage, usage]), width)


def table() -> Table:
    made = Table("name", "what is said of it", box=SIMPLE_HEAD, title="Things", caption="These are all.")
    made.add_row("a-name-of-thirty-characters-or-so", "a sentence that may be broken between its words")
    return made


def test_a_table_that_fits_is_as_rich_makes_it() -> None:
    assert text_of(WordWrapTable(table()), 100) == text_of(table(), 100)


def test_columns_shrink_to_their_longest_word_before_rows_become_paragraphs() -> None:
    lines = text_of(WordWrapTable(table()), 60).splitlines()
    assert any(line.split() == ["name", "what", "is", "said", "of", "it"] for line in lines)
    assert text_of(WordWrapTable(table()), 40).splitlines()[:3] == [
        "Things",
        "name a-name-of-thirty-characters-or-so",
        "  what is said of it a sentence that may",
    ]


def test_a_terminal_that_becomes_wider_gets_the_table_again() -> None:
    shown = WordWrapTable(table())
    text_of(shown, 40)
    assert text_of(shown, 100) == text_of(table(), 100)
