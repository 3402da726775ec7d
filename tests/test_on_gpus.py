"""Measurements of GPUs: their commands are understood, and GPUs are given to them in turn. No GPU is needed."""

import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks import processes
from benchmarks.gpus import Look, idle, looking, placement
from benchmarks.on_gpus import Measurement, Schedule, groups, main, parse, result_of, wanted
from headway.deploy.recipe.resolve import load_recipe

ROOT = Path(__file__).parents[1]


def place(output: Path, *more: str) -> list[str]:
    return ["--output", str(output), "--smollm2", "/m", "--gguf", "/m.gguf", *more]


def test_every_command_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    options = parse([*place(tmp_path), "learn"])
    measurements = wanted(parse([*place(tmp_path), *groups(options)]))
    assert len(measurements) > 25
    for one in measurements:
        assert {*one.after} < {other.name for other in measurements}
        _, name, *arguments = one.command
        if name == "pytest":
            assert [one for one in arguments if one.endswith(".py") and not (ROOT / one).is_file()] == []
        if not name.startswith("benchmarks.") or name == "benchmarks.gguf_model":
            continue
        found = importlib.util.find_spec(name)
        assert found is not None
        program = importlib.import_module(f"{name}.__main__" if found.submodule_search_locations else name)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        asked = program._parse()
        if name == "benchmarks.first_step":
            load_recipe(asked.recipe, [*placement(asked.gpus), "model.path=of_that_shape", *asked.overrides])


def test_a_dry_run_shows_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["on_gpus", *place(tmp_path / "none", "--dry-run"), "one-gpu", "learner"])
    assert main() == 0
    said = capsys.readouterr().out
    assert "warm_up_short (1 GPUs, 400 s): python -m benchmarks.peers" in said
    assert "python -m benchmarks.throughput --shape qwen3-30b-a3b --layers 8" in said
    assert not (tmp_path / "none").exists()


def python(script: str) -> tuple[str, ...]:
    """A measurement's command, which says when it ran and on which GPUs."""
    saying = "json.dumps([os.environ['CUDA_VISIBLE_DEVICES'].split(','), began, time.time()])"
    return ("-c", f"import json, os, time; began = time.time(); {script}; print({saying})")


def made(measurements: list[Measurement], output: Path, count: int = 2, seconds: float = 100.0) -> dict[str, bool]:
    schedule = Schedule(measurements, [*map(str, range(count))], output)
    schedule.run(seconds)
    return schedule.ended


def test_gpus_are_given_in_turn(tmp_path: Path) -> None:
    nap = python("time.sleep(1)")
    measurements = [
        Measurement("both", nap, 30, gpus=2),
        Measurement("one", nap, 30),
        Measurement("other", nap, 30),
        Measurement("last", nap, 30, gpus=2, after=("one",)),
    ]
    assert made(measurements, tmp_path) == dict.fromkeys([one.name for one in measurements], True)
    runs = {one.name: json.loads(result_of(tmp_path, one.name).read_text()) for one in measurements}
    assert (runs["both"][0], runs["last"][0]) == (["0", "1"], ["0", "1"])
    assert sorted(runs["one"][0] + runs["other"][0]) == ["0", "1"]
    for earlier, later in (("both", "one"), ("one", "last"), ("other", "last")):
        assert runs[earlier][2] <= runs[later][1]


def test_only_what_ended_well_has_a_result_and_is_not_made_again(tmp_path: Path) -> None:
    measurements = [
        Measurement("fails", python("raise SystemExit(3)"), 30),
        Measurement("needs_it", python("pass"), 30, after=("fails",)),
        Measurement("words", ("-c", "print('some'); print('words')"), 30),
        Measurement("too_long", python("time.sleep(60)"), 1),
        Measurement("silent", ("-c", ""), 30),
        Measurement("does_not_fit", python("pass"), 1000),
    ]
    ended = made(measurements, tmp_path)
    assert ended == {"fails": False, "needs_it": False, "words": True, "too_long": False, "silent": False}
    assert [path.name for path in tmp_path.glob("*.json")] == ["words.json"]
    assert json.loads(result_of(tmp_path, "words").read_text()) == "words"
    assert made([Measurement("words", python("raise SystemExit(3)"), 30)], tmp_path) == {"words": True}


def test_whatever_is_running_ends_with_the_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid, poll = tmp_path / "pid", processes.Group.poll

    def interrupt(group: processes.Group, wait_s: float = 0.0) -> int | None:
        if pid.exists() and pid.read_text():
            raise KeyboardInterrupt
        return poll(group, wait_s)

    monkeypatch.setattr(processes.Group, "poll", interrupt)
    sleeps = python(f"open('{pid}', 'w').write(str(os.getpid())); time.sleep(600)")
    with pytest.raises(KeyboardInterrupt):
        made([Measurement("sleeps", sleeps, 600)], tmp_path, seconds=1000.0)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_idle_time_of_gpus_is_of_the_steps_that_count() -> None:
    seen: list[Look] = [(1.0, [100.0, 100.0]), (5.0, [20.0, 60.0]), (6.0, [40.0, 80.0]), (9.0, [0.0, 0.0])]
    assert idle(seen, 4.0, 8.0) == [0.7, 0.3]
    assert idle([(5.0, [])], 4.0, 8.0) is None  # a machine without nvidia-smi
    with looking(0) as of_none:
        assert of_none == []
