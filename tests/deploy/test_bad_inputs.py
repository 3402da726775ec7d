"""Headway answers bad recipes, data files and command lines in one paragraph each, and calls none a bug."""

import importlib
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, get_args, get_origin

import msgspec
import pytest

from headway.broker.errors import ConfigError, HeadwayError
from headway.broker.user_code.kinds import typed_options
from headway.deploy.cli.main import answer
from headway.deploy.launch import broker_server, local_run
from headway.deploy.printing import visible
from headway.deploy.recipe.convert import _fields, _is_struct, _metas, _plain
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.recipe.validate import LIMITS
from headway.deploy.roles import run_client
from headway.deploy.run import run_directory
from headway.deploy.run.record import SUMMARY
from headway.deploy.run.run_directory import CONFIG, ENDPOINT, INCARNATION, held, last_incarnation
from headway.learner.stages.registry import (
    DpoOptions,
    KtoOptions,
    RewardModelOptions,
    SftOptions,
)

from .bad_inputs import COMMANDS, DATA, DOUBLING, FILES, GARBAGE, NOWHERE, OVERRIDES, RECIPE, RUNS, VALUES, rows
from .test_cli import clean_environment

DEADLINE_S = 240
OPTIONS = (
    "headway.deploy.recipe.pools",
    "headway.deploy.recipe.recipe",
    "headway.learner.data.examples",
    "headway.learner.data.prompts.arithmetic",
    "headway.learner.data.prompts.files",
    "headway.learner.data.records.loading",
    "headway.learner.stages.registry",
    "headway.rollout_workers.environments",
)
"""The modules that declare options of kinds."""
TO_NOWHERE = f"broker.url={NOWHERE}"
pytestmark = pytest.mark.filterwarnings("default")  # these tests ask for no warning of a library


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Enter a directory with a good recipe and good data. No test waits for a missing server; one that hangs fails."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("HEADWAY_")]:
        monkeypatch.delenv(name)
    for module in (run_client, local_run, run_directory, broker_server):
        monkeypatch.setattr(module, "PATIENCE_S", 0.02)
    (tmp_path / "recipe.yaml").write_text(json.dumps(RECIPE))
    (tmp_path / "halves.jsonl").write_text(json.dumps({"query": "a\udfff", "response": "b"}))
    (tmp_path / "rows.jsonl").write_bytes(rows({"prompt": "2+2=", "ground_truth": "4"}))

    def fail(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"no answer within {DEADLINE_S} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(DEADLINE_S)
    yield tmp_path
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def check(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Assert that the command ends in success, or in a paragraph that holds the expected answer."""
    code = answer(arguments)
    printed = capsys.readouterr()
    assert all(visible(character) == character for character in printed.out + printed.err)
    if code == 0:
        assert expected in printed.out
        return
    assert code in (1, 2), printed.err
    assert expected in printed.err
    assert "bug" not in printed.err
    assert "Traceback" not in printed.err
    told = [line for line in printed.err.splitlines() if line.startswith("Error: ")]
    assert len(told) == 1, printed.err
    assert code == 2 or printed.err.splitlines()[-1] == told[0], printed.err
    assert len(told[0]) < 2000


@pytest.mark.parametrize(("override", "expected"), [*VALUES, *OVERRIDES], ids=lambda value: ascii(value)[:60])
def test_a_value(override: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    check(["run", "recipe.yaml", TO_NOWHERE, override], expected, capsys)


@pytest.mark.parametrize(("content", "expected"), FILES, ids=lambda value: ascii(value)[:60])
def test_a_recipe(content: bytes, expected: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "recipe.yaml").write_bytes(content)
    check(["run", "recipe.yaml"], expected, capsys)


@pytest.mark.parametrize(("content", "expected"), DATA, ids=lambda value: ascii(value)[:60])
def test_a_data_file(content: bytes, expected: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "rows.jsonl").write_bytes(content)
    check(["run", "recipe.yaml", TO_NOWHERE], expected, capsys)


@pytest.mark.parametrize(("line", "expected"), COMMANDS, ids=lambda value: ascii(value)[:60])
def test_a_command_line(line: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    check(line.split(" "), expected, capsys)


@pytest.mark.parametrize("content", GARBAGE, ids=ascii)
def test_a_damaged_run(content: bytes, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = place / "runs" / "x"
    directory.mkdir(parents=True)
    for name in (CONFIG, ENDPOINT, INCARNATION, SUMMARY):
        (directory / name).write_bytes(content)
    with held(directory):
        check(["status"], str(Path("runs", "x", ENDPOINT)), capsys)
        check(["status", "--run", "x"], str(Path("runs", "x", ENDPOINT)), capsys)
    check(["replay", "x"], "config.yaml", capsys)
    check(["run", "recipe.yaml", TO_NOWHERE, "run.name=x", "--resume"], RUNS, capsys)
    with pytest.raises(HeadwayError, match="cannot be read"):
        last_incarnation(directory)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "recipe.yaml", TO_NOWHERE], RUNS),
        (["run", "bomb.yaml"], "once its references are replaced"),
        (["run", "recipe.yaml", b"run.name=\xff"], "is not valid YAML"),
    ],
    ids=ascii,
)
def test_a_process_of_its_own(arguments: list[str | bytes], expected: str, place: Path) -> None:
    (place / "bomb.yaml").write_text(f"x0: {'a' * 100}\n{DOUBLING}")
    signal.alarm(0)
    command = [sys.executable, "-m", "headway", *arguments]
    told = subprocess.run(command, capture_output=True, text=True, cwd=place, env=clean_environment(), check=False)
    assert told.returncode == 1, told.stderr
    (line,) = told.stderr.splitlines()
    assert line.startswith("Error: ")
    assert expected in line


def unbounded(annotation: Any, path: str) -> Iterator[str]:
    """Yield the paths of numbers without an upper bound of their own."""
    kind = _plain(annotation)
    if get_origin(kind) is tuple:
        kind = _plain(get_args(kind)[0])
    if _is_struct(kind):
        for name, below in _fields(kind).items():
            yield from unbounded(below, f"{path}.{name}".lstrip("."))
    elif kind in (int, float) and not any(meta.le or meta.lt for meta in _metas(annotation)):
        yield path


def test_every_number_of_a_recipe_has_bounds() -> None:
    assert set(unbounded(Recipe, "")) <= set(LIMITS)


def test_every_number_of_the_options_of_a_kind_has_bounds() -> None:
    """The options are those of stages, records, prompts, environments, sinks and launchers."""
    for module in OPTIONS:
        importlib.import_module(module)
    known = [kind for kind in below(msgspec.Struct) if is_of_a_kind(kind)]
    assert {"DistillationOptions", "PrometheusOptions", "SecondTryOptions", "RayRole"} <= {k.__name__ for k in known}
    assert [path for kind in known for path in unbounded(kind, kind.__name__)] == []


def is_of_a_kind(kind: type) -> bool:
    return kind.__module__ in OPTIONS and (kind.__name__.endswith("Options") or kind.__name__ == "RayRole")


def below(kind: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    ones: list[type[msgspec.Struct]] = kind.__subclasses__()
    for one in ones:
        yield from (one, *below(one))


@pytest.mark.parametrize(
    "options",
    [
        {"learning_rate": math.inf},
        {"max_steps": 10**18},
    ],
    ids=str,
)
def test_a_stage_takes_no_number_that_cannot_be_meant(options: dict[str, Any]) -> None:
    records: dict[str, Any] = {"kind": "jsonl", "path": "x"}
    for kind in (SftOptions, DpoOptions, RewardModelOptions, KtoOptions):
        typed_options({"data": records}, kind, "stages[0].options")
        with pytest.raises(ConfigError, match=rf"stages\[0\].options: Expected .* at `\$.{next(iter(options))}`"):
            typed_options({"data": records, **options}, kind, "stages[0].options")
