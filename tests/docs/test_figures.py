"""A figure stands in one place: the README quotes some, and every quotation equals its source."""

import re

from .pages import ROOT

README = (ROOT / "README.md").read_text()
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text()
STUDIED = {"no correction": "none", "`grpo`": "behavior_clip", "`dppo`": "dppo", "`sequence_tis`": "sequence_tis"}


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def row(text: str, first: str) -> list[str]:
    """Return the cells after the first one, of the row that begins with it."""
    found = re.search(rf"^\| {re.escape(first)}(?: \([^|]*)? \|.*$", text, re.MULTILINE)
    assert found, first
    return cells(found[0])[1:]


def test_the_losses_of_the_readme_are_those_of_the_results() -> None:
    section = RESULTS.split("\n## Staleness\n")[1].split("\n## ")[0]
    study, pipeline = section.split("through `headway run`")
    for preset, correction in STUDIED.items():
        on_policy, _, *old = row(study, f"grpo/{correction}")
        asynchronous = row(pipeline, "none" if correction == "none" else preset)
        measured = [figure.split(" ")[0] for figure in (on_policy, *old, *asynchronous)]
        quoted = row(README, preset)
        assert len(quoted) == len(measured) == 6
        assert [
            one
            for one, whole in zip(quoted, measured, strict=True)
            if whole and abs(float(one) - float(whole)) > 0.005001
        ] == []


def test_the_gpu_figures_of_the_readme_stand_in_the_results() -> None:
    table = README.split("## Measured on H200s")[1].split("\n## ")[0]
    figures = {
        figure
        for line in table.splitlines()[4:]
        if line.startswith("|")
        for figure in re.findall(r"\d+\.\d+", cells(line)[1])
    }
    assert len(figures) == 8
    assert [figure for figure in figures if not re.search(rf"(?<![\d.]){re.escape(figure)}", RESULTS)] == []


def test_the_demo_ends_in_the_readme_as_it_does_in_start() -> None:
    start = (ROOT / "docs" / "start.md").read_text()
    quoted = [line for line in README.splitlines() if line.startswith("│ ")]
    assert len(quoted) >= 5
    assert [line for line in quoted if line not in start] == []
