"""Measurements of GPUs: their commands are understood, and GPUs are given to them in turn. No GPU is needed."""

import importlib
import importlib.util
import json
import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks import first_step, prefix_trees
from benchmarks.learns.parts import placement
from benchmarks.on_gpus.__main__ import SIZES
from benchmarks.on_gpus.__main__ import main as on_gpus
from benchmarks.on_gpus.measurement import SPARE_S, Machine, Measurement, closed
from benchmarks.on_gpus.plan import Plan
from benchmarks.on_gpus.schedule import Schedule, result_of
from benchmarks.on_gpus.table import groups, model
from benchmarks.peers import processes
from headway.deploy.recipe.resolve import load_recipe

ROOT = Path(__file__).parents[1]
HERE = Path(sys.executable)


def machine(output: Path, count: int) -> Machine:
    return Machine(tuple(map(str, range(count))), output, output / "model", HERE, HERE, gguf=output / "model.gguf")


def all_of(machine: Machine) -> list[Measurement]:
    return [*model(machine), *(one for of_group in groups(machine).values() for one in of_group)]


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
            random = ["model.path=of_that_shape"] if getattr(options, "shape", "") else []
            load_recipe(options.recipe, [*place, *random, *options.overrides])


@pytest.mark.parametrize("count", SIZES)
def test_each_has_room_and_all_before_it_are_there(count: int, tmp_path: Path) -> None:
    known = all_of(machine(tmp_path, count))
    names = {one.name for one in known}
    assert not {one.name for one in known if one.gpus > count or not {*one.after, *one.following} <= names}
    by_name: dict[str, set[tuple[str, ...]]] = {}
    for one in known:
        by_name.setdefault(one.name, set()).add(one.command)
        assert one.least_s <= one.likely_s <= one.seconds
    assert {name for name, commands in by_name.items() if len(commands) > 1} == set()


def test_a_command_that_bounds_itself_ends_before_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = groups(machine(tmp_path, 2))
    for one in table["starts"]:
        monkeypatch.setattr(sys, "argv", [*one.command[1:]])
        options = first_step._parse()
        assert options.runs * options.timeout_s + SPARE_S <= one.seconds
    for one in table["learner"]:
        monkeypatch.setattr(sys, "argv", [*one.command[1:]])
        assert prefix_trees._parse().seconds < one.likely < one.seconds - SPARE_S


def test_what_must_end_well_before_is_made_too() -> None:
    first, second, third = Measurement("a", (), 1), Measurement("b", (), 1, after=("a",)), Measurement("c", (), 1)
    assert closed([third, second], [first, third, second]) == [third, first, second]


def test_a_dry_run_shows_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--output", str(tmp_path / "none"), "--smollm2", "/m", "--gpus", "2", "--dry-run"]
    monkeypatch.setattr(sys, "argv", ["on_gpus", *place, "one-gpu", "learner"])
    assert on_gpus() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        "    0 to   85 s on 0 2/4    warm_up_short (85 s, at most 400): python -m benchmarks.peers"
    )
    assert "python -m benchmarks.prefix_trees --shape qwen3-30b-a3b --layers 8" in "\n".join(lines)
    assert not (tmp_path / "none").exists()


def test_a_plan_has_the_order_of_the_schedule_and_names_what_will_not_fit(tmp_path: Path) -> None:
    measurements = [
        Measurement("both", (), 20, 10, gpus=2),
        Measurement("short", (), 20, 5),
        Measurement("both_again", (), 20, 10, gpus=2, after=("short",)),
        Measurement("long", (), 40, 30),
        Measurement("beside", (), 40, 2, gpus=0),
        Measurement("too_long", (), 20),
    ]
    plan = Plan(measurements, machine(tmp_path, 2))
    plan.run(45.0)
    assert [(one.of.name, one.began, one.gpus) for one in plan.begun] == [
        ("both", 0.0, ("0", "1")),
        ("beside", 0.0, ()),
        ("short", 10.0, ("0",)),
        ("long", 10.0, ("1",)),
        ("too_long", 15.0, ("0",)),
    ]
    assert [line.split()[3] for line in plan.told() if line.startswith("does not fit")] == ["both_again"]


def test_the_races_the_learner_and_the_starts_fit_on_four_gpus(tmp_path: Path) -> None:
    of = machine(tmp_path, 4)
    table = groups(of)
    wanted = [one for name in ("long-tailed", "verl", "one-gpu", "learner", "starts") for one in table[name]]
    plan = Plan(closed(wanted, all_of(of)), of)
    plan.run(1650.0)
    assert [line for line in plan.told() if line.startswith("does not fit")] == []


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
    assert found["without_result"][:2] == ["warm_up_short", "race_short_1_trl-all-threads_1"]


def python(script: str) -> tuple[str, ...]:
    """A measurement's command, which says when it ran and on which GPUs."""
    saying = "json.dumps([os.environ['CUDA_VISIBLE_DEVICES'].split(','), began, time.time()])"
    return ("-c", f"import json, os, time; began = time.time(); {script}; print({saying})")


def made(measurements: list[Measurement], output: Path, count: int = 2, seconds: float = 100.0) -> dict[str, bool]:
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


def test_nothing_starts_that_is_likely_to_take_longer_than_is_left(tmp_path: Path) -> None:
    measurements = [
        Measurement("long", python("pass"), 100),
        Measurement("likely", python("pass"), 100, 20),
        Measurement("short", python("pass"), 20),
    ]
    assert made(measurements, tmp_path, seconds=60.0) == {"likely": True, "short": True}


def test_what_still_runs_in_the_end_is_ended(tmp_path: Path) -> None:
    sleeps = python("print('found', flush=True); time.sleep(600)")
    measurements = [Measurement("likely", sleeps, 600, 1), Measurement("worth_it", sleeps, 600, 500, least=1)]
    assert made(measurements, tmp_path, seconds=8.0) == {"likely": False, "worth_it": False}
    assert (tmp_path / "worth_it.out").read_text() == "found\n"


def test_who_waits_for_gpus_keeps_those_that_it_will_have(tmp_path: Path) -> None:
    nap, long = python("time.sleep(1)"), python("time.sleep(4)")
    measurements = [
        Measurement("nap", nap, 90, 1),
        Measurement("long", long, 90, 4, gpus=2),
        Measurement("pair", nap, 90, 1, gpus=2),
        Measurement("later", nap, 90, 1),
        Measurement("no_gpu", nap, 90, 1, gpus=0),
    ]
    assert made(measurements, tmp_path, count=4) == dict.fromkeys([one.name for one in measurements], True)
    runs = {one.name: ran(tmp_path, one.name) for one in measurements}
    assert (runs["long"][0], runs["no_gpu"][0]) == (["1", "2"], [""])
    assert runs["pair"][0] == ["0", "3"]  # which "later" could have had at once
    assert runs["later"][1] >= runs["pair"][1]


def test_a_judge_sees_more_gpus_than_it_uses(tmp_path: Path) -> None:
    measurements = [
        Measurement("judge", python("pass"), 60, quarters=1, sees=2),
        Measurement("one", python("pass"), 60),
    ]
    assert made(measurements, tmp_path) == {"judge": True, "one": True}
    assert [ran(tmp_path, name)[0] for name in ("judge", "one")] == [["0", "1"], ["1"]]
    judges = [one for one in all_of(machine(tmp_path, 4)) if one.name.endswith("_judged")]
    assert {(one.gpus, max(1, one.sees)) for one in judges} == {(1, 1), (1, 2)}


def test_all_measurements_have_one_environment_unless_the_user_sets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "2")
    names = "os.environ['VLLM_USE_FLASHINFER_SAMPLER'], os.environ['NCCL_NVLS_ENABLE']"
    assert made([Measurement("told", ("-c", f"import json, os; print(json.dumps([{names}]))"), 60)], tmp_path)["told"]
    assert json.loads(result_of(tmp_path, "told").read_text()) == ["0", "2"]


def test_an_interpreter_of_its_own_runs_the_learner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "[\\"$1\\"]"\n')
    python.chmod(0o755)
    assert made([Measurement("told", ("-c",), 60, python=python)], tmp_path)["told"]
    assert json.loads(result_of(tmp_path, "told").read_text()) == ["-c"]
    place = ["--output", str(tmp_path), "--smollm2", "/m", "--gpus", "2", "--dry-run", "--learner", str(python)]
    monkeypatch.setattr(sys, "argv", ["on_gpus", *place, "one-gpu", "learner"])
    assert on_gpus() == 0
    lines = capsys.readouterr().out.splitlines()[:-1]
    assert {"benchmarks.prefix_trees" in line for line in lines if f"{python} -m" in line} == {True}
    assert {"benchmarks.peers" in line for line in lines if " python -m" in line} == {True}


def test_a_learner_without_its_kernels_is_told_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python, output = tmp_path / "python", tmp_path / "output"
    python.write_text("#!/bin/sh\necho 'ModuleNotFoundError: no cutlass.cute' >&2; exit 1\n")
    python.chmod(0o755)
    place = ["--output", str(output), "--smollm2", "/m", "--gpus", "2", "--learner", str(python)]
    monkeypatch.setattr(sys, "argv", ["on_gpus", *place, "learner"])
    assert on_gpus() == 2
    assert "cannot import flash_attn.cute: ModuleNotFoundError: no cutlass.cute" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["on_gpus", *place[:-1], str(tmp_path / "none"), "learner"])
    assert on_gpus() == 2
    assert "No such file" in capsys.readouterr().err
    assert not output.exists()


def test_others_go_on_while_one_is_being_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE_S", 80.0)
    told, seen = tmp_path / "told", tmp_path / "seen"
    waits = f"while not os.path.exists('{told}'): time.sleep(0.1)\nopen('{seen}', 'w')"
    hangs = f"import os, signal, time; signal.signal(signal.SIGTERM, lambda *_: None)\n{waits}"
    measurements = [
        Measurement("hangs", ("-c", hangs), 3),
        Measurement("first", python("time.sleep(4)"), 60),
        Measurement("second", python(f"open('{told}', 'w')"), 60),
    ]
    assert made(measurements, tmp_path) == {"hangs": False, "first": True, "second": True}
    assert seen.exists()  # it went on until the second one ran


@pytest.mark.parametrize("limit", [60, 1])
def test_gpus_of_what_could_not_be_ended_stay_taken_and_it_is_told(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, said = processes.Group.end, list[str]()

    def fails_afterwards(group: processes.Group) -> None:
        end(group)
        raise PermissionError("not yours")

    monkeypatch.setattr(processes.Group, "end", fails_afterwards)
    nap = python("time.sleep(2)")
    schedule = Schedule(
        [Measurement("first", nap, limit), Measurement("second", nap, 60)], machine(tmp_path, 1), said.append
    )
    schedule.run(100.0)
    assert schedule.ended == {"first": limit == 60}
    (told,) = [words for words in said if "could not be ended" in words]
    assert "first" in told
    assert "not yours" in told


def test_what_waits_for_a_lost_gpu_keeps_no_other_from_those_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, failures = processes.Group.end, [PermissionError("not yours")]

    def fails_once(group: processes.Group) -> None:
        end(group)
        if failures:
            raise failures.pop()

    monkeypatch.setattr(processes.Group, "end", fails_once)
    measurements = [Measurement("first", python("pass"), 60), Measurement("both", python("pass"), 60, gpus=2)]
    last = Measurement("last", python("pass"), 60, after=("first",))
    schedule = Schedule([*measurements, last], machine(tmp_path, 2), lambda words: None)
    schedule.run(100.0)
    assert schedule.ended == {"first": True, "last": True}


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
