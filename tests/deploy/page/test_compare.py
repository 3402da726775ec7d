"""The page of several runs shows each run as its own report does, and the differences between their recipes."""

import json
from pathlib import Path
from typing import Any

import click
import pytest

from .pages import Elements, headway, write_run


def compared(*runs: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(headway("compare", *map(str, runs), "--json"))
    return found


def test_each_run_is_shown_as_its_own_report_shows_it(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in ("first", "second")]
    shown = compared(*runs)
    assert shown["title"] == "first and second"
    assert shown["runs"] == [json.loads(headway("report", str(run), "--json"))["runs"][0] for run in runs]


def test_the_settings_that_differ_are_listed_and_no_others(tmp_path: Path) -> None:
    first = write_run(tmp_path / "first", "run.name=first", "staleness.max_lag=4", "optimizer.learning_rate=1e-4")
    second = write_run(tmp_path / "second", "run.name=second", "staleness.max_lag=8", "optimizer.learning_rate=1e-4")
    assert compared(first, second)["differences"] == [{"key": "staleness.max_lag", "values": ["4", "8"]}]


def test_a_setting_that_a_run_does_not_have_differs(tmp_path: Path) -> None:
    first, second = write_run(tmp_path / "first"), write_run(tmp_path / "second")
    (first / "config.yaml").write_text("staleness: {max_lag: 4}\n")
    (second / "config.yaml").write_text("staleness: {max_lag: 4}\nnew: [1, a]\n")
    assert compared(first, second)["differences"] == [{"key": "new", "values": [None, '[1,"a"]']}]


def test_runs_of_one_name_are_called_by_their_directories(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / parent / "same") for parent in ("a", "b")]
    assert [run["name"] for run in compared(*runs)["runs"]] == [str(run) for run in runs]


def test_the_page_holds_the_json(tmp_path: Path) -> None:
    runs, output = [str(write_run(tmp_path / name)) for name in ("first", "second")], tmp_path / "page.html"
    headway("compare", *runs, "--output", str(output))
    elements = Elements(output.read_text())
    assert elements.texts["title"] == "first and second - Headway"
    assert [run["name"] for run in json.loads(elements.texts["content"])["runs"]] == ["first", "second"]


def test_the_page_lies_in_the_first_runs_directory_and_nothing_where_the_user_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = write_run(tmp_path / "runs" / "first"), write_run(tmp_path / "elsewhere" / "second")
    assert headway("compare", "first", str(second)) == "Page: runs/first/compare.html\n"
    assert (first / "compare.html").stat().st_size > 10_000
    assert headway("compare", str(second), "first") == f"Page: {second}/compare.html\n"
    headway("compare", "first", str(second), "--json")
    headway("report", "first")
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "elsewhere"}
    assert {path.name for path in first.parent.iterdir()} == {"first"}


@pytest.mark.parametrize("runs", [["a"], ["a", "a"], [f"{number}" for number in range(9)]])
def test_one_run_or_too_many_or_the_same_twice_is_wrong_usage(runs: list[str]) -> None:
    with pytest.raises(click.UsageError, match="give 2 to 8 different runs"):
        headway("compare", *runs)
