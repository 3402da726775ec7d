"""A replay states the figures that it compares, and is refused before it trains anything where it cannot work."""

from pathlib import Path

import msgspec
import pytest

from headway.broker.errors import ConfigError
from headway.deploy.recipe.resolve import dump_recipe, load_recipe
from headway.deploy.roles.replay import (
    ComparedWeights,
    Comparison,
    Replay,
    changed_settings,
    comparison_json,
    replayed_recipe,
    verdict,
)
from headway.deploy.roles.trained_model import original_recipe
from headway.deploy.run.run_directory import find_run
from headway.learner.algorithm_config import AggregationConfig
from headway.learner.config import LayoutConfig
from headway.learner.experience.log import ExperienceLog
from headway.learner.stages.loop import ReplayError
from tests.learner.batches import batch, damage

from .runs import step_metrics

RECIPE = load_recipe("arithmetic.yaml")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the directory of a run that was moved here after it had trained three steps."""
    directory = tmp_path / "moved"
    directory.mkdir()
    (directory / "config.yaml").write_text(dump_recipe(RECIPE))
    steps = [msgspec.json.encode(step_metrics(step)) for step in range(3)]
    (directory / "metrics.jsonl").write_bytes(b"\n".join([*steps, b""]))
    return directory


def log_steps(run: Path, *steps: int) -> None:
    log = ExperienceLog(run / "experience", 1 << 20)
    for step in steps:
        log.record(step, batch(step))


def planned(run: Path, first_step: int = 0, steps: int | None = None) -> Replay:
    original = original_recipe(run)
    return Replay(original=original, recipe=original, first_step=first_step, steps=steps)


def test_a_run_is_found_by_path_or_name(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_run(str(run)) == run
    assert original_recipe(run).run_directory == run
    (tmp_path / "runs").mkdir()
    run.rename(tmp_path / "runs" / "tiny")
    monkeypatch.chdir(tmp_path)
    assert find_run("tiny") == Path("runs/tiny")
    with pytest.raises(ConfigError, match="There is no run 'other'"):
        find_run("other")


def test_a_preset_replaces_the_whole_algorithm() -> None:
    own = msgspec.structs.replace(RECIPE.algorithm, aggregation=AggregationConfig(kind="sequence_mean"))
    original = msgspec.structs.replace(RECIPE, algorithm=own)
    assert replayed_recipe(original, None, ()) == original
    recipe = replayed_recipe(original, "tis", ("optimizer.learning_rate=0.5", "algorithm.corrections[0].options.cap=3"))
    assert (recipe.algorithm.preset, recipe.algorithm.objective.anchor) == ("tis", "proximal")
    assert [(one.kind, one.options) for one in recipe.algorithm.corrections] == [("truncated_is", {"cap": 3})]
    assert recipe.algorithm.aggregation == replayed_recipe(RECIPE, "tis", ()).algorithm.aggregation
    assert "optimizer.learning_rate" in changed_settings(original, recipe)
    with pytest.raises(ConfigError, match="there is no preset 'nope'"):
        replayed_recipe(original, "nope", ())


def test_it_goes_as_far_as_was_trained_and_the_log_reaches(run: Path) -> None:
    log_steps(run, 0, 1, 2, 3)
    assert planned(run)._range() == range(3)  # step 3 was taken and never trained
    assert planned(run, steps=2)._range() == range(2)
    damage(run / "experience", 1)
    assert planned(run)._range() == range(1)


def test_what_is_missing_is_said(run: Path) -> None:
    with pytest.raises(ReplayError, match=r"does not hold step 0 .* --from can be: none of the checkpoints"):
        planned(run).run()
    log_steps(run, 0)
    with pytest.raises(ReplayError, match="There is no checkpoint at step 2 to start from; --from can be 0"):
        planned(run, first_step=2).run()


def test_no_replay_overwrites_another(run: Path) -> None:
    for name in ("grpo", "grpo-2", "grpo-3"):
        path = planned(run)._output
        assert path == run / "replays" / name
        path.mkdir(parents=True)


SPLIT = {"context": 2}, {"context": 3}, {"context": 6}


@pytest.mark.parametrize("layout", SPLIT)
def test_a_run_whose_model_was_split_is_replayed_whole(layout: dict[str, int], run: Path) -> None:
    layouts = {
        "processes": 6,
        "layout": LayoutConfig(**layout),
        "agreement_bound": 0,
    }  # the logged logprobs are made up
    learner = msgspec.structs.replace(RECIPE.learner, **layouts)
    (run / "config.yaml").write_text(dump_recipe(msgspec.structs.replace(RECIPE, learner=learner)))
    log_steps(run, 0, 1)
    comparison = planned(run).run()
    assert (comparison.ranks, comparison.changed, len(comparison.replayed)) == (6, (), 2)


def compared(*losses: float | None, changed: tuple[str, ...] = (), digest: str = "same") -> Comparison:
    """Return the comparison with a run that had losses of 0.01."""
    weights = ComparedWeights(step=3, checkpoint="step_3", replayed_digest=digest, original_digest="same")
    return Comparison(
        run="r",
        directory="d",
        changed=changed,
        ranks=2,
        replayed=tuple(msgspec.structs.replace(step_metrics(step), loss=loss) for step, loss in enumerate(losses)),
        original={step: step_metrics(step) for step in range(2)},
        weights=(weights,),
    )


def test_one_bit_makes_a_difference() -> None:
    same, other = compared(0.01, 0.01, 0.3), compared(0.01, 0.010000000000000002)
    assert (same.first_difference, same.is_identical, same.is_as_promised) == (None, True, True)
    assert (other.first_difference, other.is_identical, other.is_as_promised) == (1, False, False)
    assert compared(None).first_difference == 0
    assert compared(0.01, digest="other").is_identical is False
    assert compared(0.5, changed=("a.b",)).is_as_promised
    assert "the run's learner had 2, a replay has 1" in " ".join(verdict(other))
    assert comparison_json(other)["first_difference"] == 1
