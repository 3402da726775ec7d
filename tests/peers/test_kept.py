"""Figures that are kept are read as those of their own race alone."""

from functools import partial
from pathlib import Path

import msgspec
import pytest

from benchmarks.peers import contestants
from benchmarks.peers.figures import figures_of
from benchmarks.peers.race import Race
from headway.broker.errors import ConfigError
from headway.deploy.run.stage_output import mark_complete
from tests.peers.races import race_in, steps_of

ONE = figures_of(steps_of(1.0, 2.0))


def test_a_run_that_has_ended_is_not_made_again(tmp_path: Path) -> None:
    later = msgspec.structs.replace(ONE, samples_per_s=9.0)
    solved = msgspec.structs.replace(later, pass_rate=0.5)
    kept = partial(contestants.kept, race_in(tmp_path), "headway-0")
    assert kept(lambda: ONE, None, is_read=True) == ONE
    assert kept(lambda: later, None, is_read=True) == ONE
    assert kept(lambda: later, None, is_read=False) == later
    assert kept(lambda: ONE, lambda _: solved, is_read=True) == solved
    assert kept(lambda: ONE, lambda _: ONE, is_read=True) == solved


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


def test_figures_of_another_race_are_refused(tmp_path: Path) -> None:
    contestants.kept(race_in(tmp_path, "learner.steps=20"), "headway-0", lambda: ONE, None, is_read=True)
    contestants.check(race_in(tmp_path, "learner.steps=20", "evaluation.prompts=8", second_gpu="3"), ["headway-0"])
    other = race_in(tmp_path, "learner.steps=30", "learner.group_size=4")
    contestants.check(other, ["trl-1-thread-0"])  # a contestant may have steps of its own
    with pytest.raises(ConfigError, match=r"learner.group_size is 8, not 4, learner.steps is 20, not 30: give another"):
        contestants.check(other, ["headway-0"])


def test_kept_figures_of_a_peer_are_of_any_overrides_that_are_headways_alone(tmp_path: Path) -> None:
    for name in ("trl-1-thread-0", "headway-0"):
        contestants.kept(race_in(tmp_path), name, lambda: ONE, None, is_read=True)
    fresher = race_in(tmp_path, own=("staleness.max_lag=1",))
    contestants.check(fresher, ["trl-1-thread-0"])
    with pytest.raises(ConfigError, match=r"own is \[\], not"):
        contestants.check(fresher, ["headway-0"])


def test_an_output_whose_model_was_warmed_up_otherwise_is_refused(tmp_path: Path) -> None:
    race = race_in(tmp_path)
    race.model.mkdir()
    mark_complete(race.model, race.load(), {})
    contestants.check(race_in(tmp_path, "learner.steps=3", "evaluation.prompts=8"), [])
    with pytest.raises(ConfigError, match=r"has a model that other settings have warmed up: give another"):
        contestants.check(race_in(tmp_path, "run.seed=9"), [])
