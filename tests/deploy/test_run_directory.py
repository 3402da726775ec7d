"""A run's directory is never overwritten by accident, never shared, and found again."""

import fcntl
import os
from pathlib import Path

import pytest

from broker.errors import ConfigError, HeadwayError
from deploy.config import load_recipe
from deploy.recipe import Recipe
from deploy.run_directory import endpoint, held, newest_endpoint, prepare


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return load_recipe("arithmetic.yaml", [f"run.directory={tmp_path}", "run.name=mine"])


def test_a_fresh_directory_holds_the_resolved_recipe(recipe: Recipe, tmp_path: Path) -> None:
    directory = prepare(recipe, resume=False, overwrite=False)
    assert directory == tmp_path / "mine"
    assert load_recipe(directory / "config.yaml") == recipe
    assert (directory / "logs").is_dir()


def test_an_existing_run_is_refused_and_both_ways_out_are_named(recipe: Recipe, tmp_path: Path) -> None:
    prepare(recipe, resume=False, overwrite=False)
    with pytest.raises(ConfigError) as caught:
        prepare(recipe, resume=False, overwrite=False)
    assert str(caught.value) == (
        f"{tmp_path / 'mine'} already holds a run. Go on with it (--resume), start it anew and lose"
        f" what it holds"
        " (--overwrite), or choose another name (run.name=...)."
    )


def test_overwrite_empties_and_resume_keeps(recipe: Recipe) -> None:
    kept = prepare(recipe, resume=False, overwrite=False) / "metrics.jsonl"
    kept.touch()
    prepare(recipe, resume=True, overwrite=False)
    assert kept.exists()
    prepare(recipe, resume=False, overwrite=True)
    assert not kept.exists()


def test_overwrite_leaves_alone_what_is_no_run(recipe: Recipe) -> None:
    recipe.run_directory.mkdir()
    precious = recipe.run_directory / "thesis.tex"
    precious.touch()
    with pytest.raises(ConfigError, match=r"holds no config\.yaml, so it is no run of Headway's"):
        prepare(recipe, resume=False, overwrite=True)
    assert precious.exists()


def test_there_must_be_something_to_resume(recipe: Recipe) -> None:
    with pytest.raises(ConfigError, match=r"There is no run to resume in .*mine\. Start it without --resume\."):
        prepare(recipe, resume=True, overwrite=False)


def test_a_directory_is_held_by_one_process(recipe: Recipe, tmp_path: Path) -> None:
    other = os.open(tmp_path / ".mine.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(HeadwayError, match=r"Another process runs in .*mine\."), held(recipe.run_directory):
        pass
    os.close(other)
    with held(recipe.run_directory):
        pass


def test_the_newest_run_is_found_while_it_runs(tmp_path: Path) -> None:
    for age, name in ((100, "old"), (0, "new"), (-100, "killed")):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "broker.json").write_text(f'{{"url": "unix:///{name}", "run": "{name}"}}')
        os.utime(directory / "broker.json", (1e9 - age, 1e9 - age))
    with held(tmp_path / "old"), held(tmp_path / "new"):
        assert newest_endpoint(tmp_path).run == "new"
        (tmp_path / "current").mkdir()
        with held(tmp_path / "current"), endpoint(tmp_path / "current", "unix:///x", "current"):
            assert newest_endpoint(tmp_path).url == "unix:///x"
        assert newest_endpoint(tmp_path).run == "new"


def test_no_run_at_all(tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match=r"No run is going on below .*Name one: --broker URL --run NAME"):
        newest_endpoint(tmp_path)
