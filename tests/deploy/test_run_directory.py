"""A run's directory is never overwritten by accident, never shared, and found again."""

import fcntl
import os
import time
from pathlib import Path

import pytest

from headway.broker.errors import ConfigError, HeadwayError
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.recipe.resolve import load_recipe, with_overrides
from headway.deploy.run.run_directory import (
    CONFIG,
    endpoint,
    find_endpoint,
    held,
    last_incarnation,
    newest_endpoint,
    prepare,
    write_incarnation,
)
from headway.deploy.run.stage_output import mark_complete


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return load_recipe("arithmetic.yaml", [f"run.directory={tmp_path}", "run.name=mine"])


def test_a_fresh_directory_holds_the_resolved_recipe(recipe: Recipe, tmp_path: Path) -> None:
    directory = prepare(recipe, resume=False, overwrite=False)
    assert directory == tmp_path / "mine"
    assert load_recipe(directory / "config.yaml") == recipe
    assert (directory / "logs").is_dir()


def test_an_existing_run_is_refused_and_both_ways_out_are_named(recipe: Recipe, tmp_path: Path) -> None:
    (prepare(recipe, resume=False, overwrite=False) / "metrics.jsonl").touch()
    with pytest.raises(ConfigError) as caught:
        prepare(recipe, resume=False, overwrite=False)
    for part in (str(tmp_path / "mine"), "--resume", "--overwrite", "run.name"):
        assert part in str(caught.value)


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


def test_a_start_that_came_to_nothing_is_no_run(recipe: Recipe) -> None:
    directory = prepare(recipe, resume=False, overwrite=False)
    for name in ("sft", "broker"):
        (directory / name).mkdir()
        (directory / name / "half").touch()
    (directory / "broker.json").touch()
    for name in ("logs/learner.log", "report.html", "compare.html"):
        (directory / name).touch()
    prepare(recipe, resume=False, overwrite=False)
    assert not (directory / "broker").exists()
    assert not (directory / "broker.json").exists()
    assert (directory / "logs" / "learner.log").exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints", "thesis.tex"])
def test_whatever_else_is_there_is_not_lost(recipe: Recipe, name: str) -> None:
    directory = prepare(recipe, resume=False, overwrite=False)
    (directory / name).touch()
    with pytest.raises(ConfigError, match="already holds a run"):
        prepare(recipe, resume=False, overwrite=False)


@pytest.mark.parametrize("is_first_start", [True, False])  # True: `headway sft` made it, before any start
@pytest.mark.parametrize(
    ("change", "is_kept"),
    [
        ("learner.steps=3", True),
        ("run.seed=3", False),
        ("model.dtype=bfloat16", False),
        ("sft.phases[0].max_steps=3", False),
        ("prompts.options.max_operations=3", False),
    ],
)
def test_a_finished_warm_up_is_kept_for_the_same_recipe(
    recipe: Recipe, is_first_start: bool, change: str, is_kept: bool
) -> None:
    if not is_first_start:
        prepare(recipe, resume=False, overwrite=False)
    sft = recipe.run_directory / "sft"
    sft.mkdir(parents=True)
    mark_complete(sft, recipe, {"steps": 1})
    said: list[str] = []
    prepare(with_overrides(recipe, [change]), resume=False, overwrite=False, say=said.append)
    assert sft.exists() == is_kept
    assert said == ([] if is_kept else [f"{sft} holds a stage of another recipe; it is removed."])


def test_a_place_that_cannot_be_written_is_named(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    nowhere = with_overrides(recipe, [f"run.directory={tmp_path / 'file'}"])
    said = r"mine cannot be made or written: .*\. Choose another place \(run\.directory=\.\.\.\)"
    with pytest.raises(HeadwayError, match=said):
        prepare(nowhere, resume=False, overwrite=False)
    with pytest.raises(HeadwayError, match=said), held(nowhere.run_directory):
        pass


def test_there_must_be_something_to_resume(recipe: Recipe) -> None:
    with pytest.raises(ConfigError, match=r"There is no run to resume in .*mine\. Start it without --resume\."):
        prepare(recipe, resume=True, overwrite=False)


def test_who_holds_a_directory_is_told(recipe: Recipe) -> None:
    told = rf"Another process runs in .*mine: process {os.getpid()} of .* on .*, since 20"
    with held(recipe.run_directory), pytest.raises(HeadwayError, match=told), held(recipe.run_directory):
        pass


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
        assert find_endpoint(tmp_path, None).run == "new"
        assert find_endpoint(tmp_path, "old").run == "old"
        with pytest.raises(ConfigError, match="going on here is new, not killed"):
            find_endpoint(tmp_path, "killed")
        (tmp_path / "current").mkdir()
        with held(tmp_path / "current"), endpoint(tmp_path / "current", "unix:///x", "current"):
            assert newest_endpoint(tmp_path).url == "unix:///x"
        assert newest_endpoint(tmp_path).run == "new"


def test_no_run_at_all(tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match=r"No run is going on below .*Name one: --broker URL --run NAME"):
        newest_endpoint(tmp_path)
    for age_s, name in ((9, "old"), (5, "new"), (7, "middle")):
        (tmp_path / name).mkdir()
        (tmp_path / name / CONFIG).touch()
        os.utime(tmp_path / name / CONFIG, (time.time() - age_s,) * 2)
    with pytest.raises(HeadwayError, match="has ended is shown by `headway report new`"):
        newest_endpoint(tmp_path)
    with held(tmp_path / "new"), pytest.raises(HeadwayError, match="Run new has no workers and no broker yet"):
        newest_endpoint(tmp_path)


def test_the_last_incarnation_is_remembered(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    assert last_incarnation(directory) == 0
    for incarnation in (1, 12):
        write_incarnation(directory, incarnation)
        assert last_incarnation(directory) == incarnation
    write_incarnation(directory, 11)  # by a learner that was held up after its claim, and replaced
    assert last_incarnation(directory) == 12
    assert [path.name for path in directory.iterdir()] == ["incarnation"]
