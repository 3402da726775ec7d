"""Figures that are kept are read as those of their own race alone."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from benchmarks.peers import contestants
from benchmarks.peers.__main__ import main as peers
from benchmarks.peers.figures import Figures, figures_of
from benchmarks.peers.kept import BEFORE, Kept
from benchmarks.peers.race import LONG_TAILED, Race
from headway.broker.errors import ConfigError
from headway.deploy.run.stage_output import mark_complete
from tests.peers.races import race_in, steps_of

ROOT = Path(__file__).parents[2]


def test_a_run_that_has_ended_is_not_made_again(tmp_path: Path) -> None:
    one = figures_of(steps_of(1.0, 2.0), engine_idle=None, pause_per_update_s=None)
    later = msgspec.structs.replace(one, samples_per_s=9.0)
    solved = msgspec.structs.replace(later, pass_rate=0.5)
    race = race_in(tmp_path)
    go_on, anew = Kept(tmp_path, race, is_read=True), Kept(tmp_path, race, is_read=False)
    assert go_on.figures("headway-0", lambda: one, None) == one
    assert go_on.figures("headway-0", lambda: later, None) == one
    assert anew.figures("headway-0", lambda: later, None) == later
    assert go_on.figures("headway-0", lambda: one, lambda _: solved) == solved
    assert go_on.figures("headway-0", lambda: one, lambda _: one) == solved


def test_an_output_may_begin_with_the_warm_up_of_another(race: Race, tmp_path: Path) -> None:
    own = race_in(tmp_path / "own")
    with pytest.raises(ConfigError, match="has no warmed-up model"):
        contestants.copy_warm_up(own, tmp_path)
    mark_complete(race.model, race.load(), {})
    Path(own.output).mkdir()
    contestants.copy_warm_up(own, tmp_path)
    assert {path.name for path in own.model.iterdir()} == {path.name for path in race.model.iterdir()}
    (own.model / "its_own").touch()
    contestants.copy_warm_up(own, tmp_path)
    assert (own.model / "its_own").exists()


def test_a_warmed_up_model_of_another_output_is_measured_there_alone(
    race: Race, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mark_complete(race.model, race_in(tmp_path).load(), {})
    ran = msgspec.structs.replace(
        figures_of(steps_of(1.0, 2.0), engine_idle=None, pause_per_update_s=None), model="its"
    )
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(contestants, "run", lambda *_: ran)
    monkeypatch.setattr(contestants, "pass_rate", lambda _, model, __: 0.5 if model == race.model else 0.7)
    before = []
    own = ["--output", str(tmp_path / "own"), "--warmed-up", race.output]
    for begin in (["--output", race.output, "--of", ""], own):
        monkeypatch.setattr(sys, "argv", ["peers", "--of", "headway", *begin])
        assert peers() == 0
        before.append(json.loads(capsys.readouterr().out)["pass_rate_before"])
    assert before == [0.5, None]
    assert not (tmp_path / "own" / "figures" / "before.json").exists()


def test_figures_of_another_race_are_refused(tmp_path: Path) -> None:
    names, one = ["headway-0"], figures_of(steps_of(1.0, 2.0), engine_idle=None, pause_per_update_s=None)
    Kept(tmp_path, race_in(tmp_path, "learner.steps=20"), is_read=True).figures("headway-0", lambda: one, None)
    same = race_in(tmp_path, "learner.steps=20", "evaluation.prompts=8", second_gpu="3")
    Kept(tmp_path, same, is_read=True).check(names)
    other = race_in(tmp_path, "learner.steps=30", "learner.group_size=4")
    Kept(tmp_path, other, is_read=False).check(names)  # it makes the run anew
    Kept(tmp_path, other, is_read=True).check(["trl-1-thread-0"])  # a contestant may have steps of its own
    with pytest.raises(ConfigError, match=r"learner.group_size is 8, not 4, learner.steps is 20, not 30: give another"):
        Kept(tmp_path, other, is_read=True).check(names)
    (tmp_path / "figures" / "headway-0.json").write_bytes(msgspec.json.encode(one))  # as older versions kept them
    with pytest.raises(
        ConfigError, match=r"of the kept figures of headway-0 in .* nothing says which race: give another"
    ):
        Kept(tmp_path, same, is_read=True).check(names)


def test_a_race_killed_while_it_keeps_figures_leaves_none_beside_the_settings_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = figures_of(steps_of(1.0, 2.0), engine_idle=None, pause_per_update_s=None)
    other = msgspec.structs.replace(ours, samples_per_s=9.0)
    races = [race_in(tmp_path, f"learner.steps={steps}") for steps in (20, 30)]
    for allowed in range(3):  # of the renames of the second race; the process is killed at the next one
        Kept(tmp_path, races[0], is_read=False).figures("headway-0", lambda: ours, None)
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            move = until_killed(allowed)
            patch.setattr(Path, "rename", move)
            patch.setattr(Path, "replace", move)
            Kept(tmp_path, races[1], is_read=False).figures("headway-0", lambda: other, None)
        read = [readable(Kept(tmp_path, race, is_read=True)) for race in races]
        assert read in ([ours, None], [None, other])


def until_killed(allowed: int) -> Callable[[Path, Path], None]:
    left = iter(range(allowed))

    def move(path: Path, target: Path) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        os.replace(path, target)

    return move


def readable(kept: Kept) -> Figures | None:
    try:
        kept.check(["headway-0"])
    except ConfigError:
        return None
    return kept.figures("headway-0", lambda: pytest.fail("made again"), None)


def test_figures_that_another_race_put_there_meanwhile_are_refused(tmp_path: Path) -> None:
    one = figures_of(steps_of(1.0, 2.0), engine_idle=None, pause_per_update_s=None)
    kept = Kept(tmp_path, race_in(tmp_path), is_read=True)
    kept.check(["headway-0"])
    Kept(tmp_path, race_in(tmp_path, "learner.steps=3"), is_read=False).figures("headway-0", lambda: one, None)
    with pytest.raises(ConfigError, match=r"learner\.steps is 3, not"):
        kept.figures("headway-0", lambda: one, None)


def test_kept_figures_of_a_peer_are_of_any_overrides_that_are_headways_alone(tmp_path: Path) -> None:
    one = figures_of(steps_of(1.0, 2.0), engine_idle=None, pause_per_update_s=None)
    for name in ("trl-1-thread-0", "headway-0"):
        Kept(tmp_path, race_in(tmp_path), is_read=True).figures(name, lambda: one, None)
    fresher = Kept(tmp_path, race_in(tmp_path, own=("staleness.max_lag=1",)), is_read=True)
    fresher.check(["trl-1-thread-0"])
    with pytest.raises(ConfigError, match=r"own is \[\], not"):
        fresher.check(["headway-0"])


def test_the_pass_rate_of_another_warmed_up_model_is_refused(tmp_path: Path) -> None:
    race = race_in(tmp_path)
    assert Kept(tmp_path, race, is_read=True).before(lambda: 0.25) == 0.25
    same = Kept(tmp_path, race_in(tmp_path, "learner.steps=3", gpus=1), is_read=True)
    same.check([BEFORE])
    assert same.before(lambda: pytest.fail("measured again")) == 0.25
    for change in ("model.path=other", "evaluation.prompts=8", "run.seed=9"):
        other = Kept(tmp_path, race_in(tmp_path, change), is_read=True)
        key, value = change.split("=")
        said = rf"kept figures of before in .*{key.removeprefix('run.')} is .*, not {value}[,:].* give another"
        with pytest.raises(ConfigError, match=said):
            other.check([BEFORE])
        with pytest.raises(ConfigError, match=said):
            other.before(lambda: 0.5)
    (tmp_path / "figures" / "before.json").write_text("0.25")  # as older versions kept it
    with pytest.raises(ConfigError, match=r"of the kept figures of before in .* nothing says which race"):
        same.check([BEFORE])


def test_an_output_whose_model_was_warmed_up_otherwise_is_refused(tmp_path: Path) -> None:
    race = race_in(tmp_path)
    race.model.mkdir()
    mark_complete(race.model, race.load(), {})
    Kept(tmp_path, race_in(tmp_path, "learner.steps=3", "evaluation.prompts=8"), is_read=False).check([])
    with pytest.raises(ConfigError, match=r"has a model that other settings have warmed up: give another"):
        Kept(tmp_path, race_in(tmp_path, "run.seed=9"), is_read=False).check([])


def test_an_output_of_another_task_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "task").write_text("arithmetic.yaml")
    command = [sys.executable, "-m", "benchmarks.peers", "--output", str(tmp_path), "--of", "", "--task", LONG_TAILED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert f"--output {tmp_path} is of the recipe arithmetic.yaml, not of " in done.stderr
    assert not (tmp_path / "sft").exists()
