"""Measurements of GPUs: their commands are understood, and GPUs are given to them in turn. No GPU is needed."""

import importlib
import importlib.util
import json
import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks import first_step
from benchmarks.learns.parts import placement
from benchmarks.on_gpus.__main__ import SIZES
from benchmarks.on_gpus.__main__ import main as on_gpus
from benchmarks.on_gpus.measurement import SPARE_S, Machine, Measurement, closed
from benchmarks.on_gpus.schedule import Schedule, result_of
from benchmarks.on_gpus.table import groups
from deploy.recipe.loading import load_recipe

ROOT = Path(__file__).parents[1]
HERE = Path(sys.executable)


def machine(output: Path, count: int) -> Machine:
    return Machine(tuple(map(str, range(count))), output, output / "model", HERE, HERE)


def all_of(machine: Machine) -> list[Measurement]:
    return [one for of_group in groups(machine).values() for one in of_group]


@pytest.mark.parametrize("count", SIZES)
def test_every_command_is_understood(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))))
    commands = {one.command for one in all_of(machine(tmp_path, count))}
    assert len(commands) > 40
    for _, name, *arguments in commands:
        if name == "pytest":
            assert [one for one in arguments if one.endswith(".py") and not (ROOT / one).is_file()] == []
            continue
        found = importlib.util.find_spec(name)
        assert found is not None
        program = importlib.import_module(f"{name}.__main__" if found.submodule_search_locations else name)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        options = (getattr(program, "_parse", None) or program.parse)()
        if getattr(options, "recipe", None):
            place = placement(options.gpus, getattr(options, "learner_gpus", 1))
            load_recipe(options.recipe, [*place, *options.overrides])


@pytest.mark.parametrize("count", SIZES)
def test_each_has_room_and_all_before_it_are_there(count: int, tmp_path: Path) -> None:
    known = all_of(machine(tmp_path, count))
    names = {one.name for one in known}
    assert not {one.name for one in known if one.gpus > count or not {*one.after, *one.following} <= names}
    by_name: dict[str, set[tuple[str, ...]]] = {}
    for one in known:
        by_name.setdefault(one.name, set()).add(one.command)
    assert {name for name, commands in by_name.items() if len(commands) > 1} == set()


def test_all_runs_of_a_start_fit_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for one in groups(machine(tmp_path, 2))["starts"]:
        monkeypatch.setattr(sys, "argv", [*one.command[1:]])
        options = first_step._parse()
        assert options.runs * options.timeout_s + SPARE_S <= one.seconds


def test_what_must_end_well_before_is_made_too() -> None:
    first, second, third = Measurement("a", (), 1), Measurement("b", (), 1, after=("a",)), Measurement("c", (), 1)
    assert closed([second], [first, third, second]) == [first, second]


def test_a_dry_run_shows_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--output", str(tmp_path / "none"), "--smollm2", "/m", "--gpus", "2", "--dry-run"]
    monkeypatch.setattr(sys, "argv", ["on_gpus", *place, "one-gpu", "learner"])
    assert on_gpus() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" (")[0] for line in lines[:2]] == ["race_short", "race_short_1_headway_1"]
    assert "python -m benchmarks.prefix_trees --shape qwen3-30b-a3b --layers 8" in lines[-1]
    assert not (tmp_path / "none").exists()


def test_the_last_line_has_medians_of_the_races(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, speed in enumerate((300.0, 200.0, 250.0), start=1):
        run = f"race_short_1_headway_{number}"
        told = {"samples_per_s": {"headway": [speed]}, "headway": {"pass_rate": 0.7}}
        result_of(tmp_path, run).write_text(json.dumps(told))
        result_of(tmp_path, f"{run}_judged").write_text(json.dumps(told))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    place = ["--output", str(tmp_path), "--smollm2", "/m", "--gpus", "2", "--seconds", "0"]
    monkeypatch.setattr(sys, "argv", ["on_gpus", *place, "one-gpu"])
    assert on_gpus() == 1
    found = json.loads(capsys.readouterr().out)
    speeds = {"median": 250.0, "runs": [300.0, 200.0, 250.0], "pass_rates": [0.7, 0.7, 0.7]}
    assert found["samples_per_s"] == {"race_short_1_headway": speeds}
    assert found["without_result"][:2] == ["race_short", "race_short_1_trl-all-threads_1"]


def python(script: str) -> tuple[str, ...]:
    """A measurement's command, which says when it ran and on which GPUs."""
    saying = "json.dumps([os.environ['CUDA_VISIBLE_DEVICES'].split(','), began, time.time()])"
    return ("-c", f"import json, os, time; began = time.time(); {script}; print({saying})")


def made(measurements: list[Measurement], output: Path, count: int = 2, seconds: float = 60.0) -> dict[str, bool]:
    schedule = Schedule(measurements, machine(output, count), lambda words: None)
    schedule.run(seconds)
    return schedule.ended


def ran(output: Path, name: str) -> tuple[list[str], float, float]:
    gpus, began, ended = json.loads(result_of(output, name).read_text())
    return gpus, began, ended


def test_gpus_are_given_in_turn(tmp_path: Path) -> None:
    nap = python("time.sleep(1)")
    measurements = [
        Measurement("both", nap, 20, gpus=2),
        Measurement("one", nap, 20, in_turn="socket"),
        Measurement("other", nap, 20, in_turn="socket"),
        Measurement("quarter", nap, 20, quarters=1),
        Measurement("half", nap, 20, quarters=2),
        Measurement("last", nap, 20, gpus=2, after=("one",)),
    ]
    assert made(measurements, tmp_path) == dict.fromkeys([one.name for one in measurements], True)
    runs = {one.name: ran(tmp_path, one.name) for one in measurements}
    assert (runs["both"][0], runs["last"][0]) == (["0", "1"], ["0", "1"])
    for earlier, later in (("both", "one"), ("one", "other"), ("one", "last"), ("other", "last")):
        assert runs[earlier][2] <= runs[later][1]
    assert runs["quarter"][0] == runs["half"][0] != runs["one"][0]  # they share a GPU that "one" does not have


def test_only_what_ended_well_has_a_result_and_is_not_made_again(tmp_path: Path) -> None:
    measurements = [
        Measurement("fails", python("raise SystemExit(3)"), 20),
        Measurement("needs_it", python("pass"), 20, after=("fails",)),
        Measurement("comes_later", ("-c", "print('some'); print('words')"), 20, following=("fails",)),
        Measurement("too_long", python("time.sleep(60)"), 1),
        Measurement("silent", ("-c", ""), 20),
    ]
    assert made(measurements, tmp_path) == {
        "fails": False,
        "needs_it": False,
        "comes_later": True,
        "too_long": False,
        "silent": False,
    }
    assert [path.name for path in tmp_path.glob("*.json")] == ["comes_later.json"]
    assert json.loads(result_of(tmp_path, "comes_later").read_text()) == "words"
    again = [Measurement("comes_later", python("raise SystemExit(3)"), 20)]
    assert made(again, tmp_path) == {"comes_later": True}


def test_nothing_starts_that_may_take_longer_than_is_left(tmp_path: Path) -> None:
    measurements = [Measurement("long", python("pass"), 100), Measurement("short", python("pass"), 20)]
    assert made(measurements, tmp_path, seconds=60.0) == {"short": True}


def test_whatever_is_running_ends_with_the_schedule(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    started = f"open('{pid}', 'w').write(str(os.getpid())); time.sleep(600)"

    def interrupt(words: str) -> None:
        while not (pid.exists() and pid.read_text()) and "waits" in words:
            time.sleep(0.05)
        if "waits" in words:
            raise KeyboardInterrupt

    measurements = [Measurement("sleeps", python(started), 600), Measurement("waits", python("pass"), 600)]
    with pytest.raises(KeyboardInterrupt):
        Schedule(measurements, machine(tmp_path, 2), interrupt).run(1000.0)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
