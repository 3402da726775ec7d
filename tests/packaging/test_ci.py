"""The files for pre-commit and for a forge's CI call targets that the Makefile has."""

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def opened(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def test_hooks_are_targets() -> None:
    (local,) = opened(".pre-commit-config.yaml")["repos"]
    assert local["repo"] == "local"
    assert [hook["entry"] for hook in local["hooks"]] == ["make lint", "make test-quick"]
    assert {hook["entry"].removeprefix("make ") for hook in local["hooks"]} <= TARGETS


def test_the_workflow_runs_what_ci_runs_here() -> None:
    workflow = opened(".github/workflows/ci.yml")
    matrix = workflow["jobs"]["make"]["strategy"]["matrix"]
    parts = re.findall(r"^test-environments: (.+?)  ##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert matrix["target"] == ["check", *parts[0].split()]
    assert set(matrix["target"]) <= TARGETS
    (variables,) = [more["variables"] for more in matrix["include"]]
    assert variables in (ROOT / ".ci" / "run").read_text()
