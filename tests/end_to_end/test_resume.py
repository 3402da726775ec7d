"""A learner is killed and resumed: it trains nothing twice, no version regresses, and no bit is different."""

import signal
from pathlib import Path

import pytest
import torch

from tests.damage import flip_bits

from .fixed_batches import (
    STEPS,
    checkpoint_at,
    final_checkpoint,
    run_directory,
    scripted_worker,
    start_learner,
    training_state,
)
from .recipes import write_recipe
from .records import check_trained, lines
from .terminals import Terminals
from .watching import watching


def test_a_killed_and_resumed_learner_ends_with_the_same_bits(
    terminals: Terminals, url: str, uninterrupted: Path
) -> None:
    with scripted_worker(url, terminals) as worker:
        first = start_learner(terminals, url)
        worker.answer(range(5))
        worker.watch.until_step(5)  # two steps beyond the checkpoint
        worker.watch.until_durable(checkpoint_at(terminals, incarnation=1, step=3))
        worker.answer_groups(slot=5, groups=1)
        first.send(signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL
        second = start_learner(terminals, url, "--resume")
        worker.answer_groups(slot=5, groups=2)
        worker.answer(range(6, STEPS))
        second.succeeds()
    trained = lines(run_directory(terminals) / "trained.jsonl")
    assert [(line["incarnation"], line["step"]) for line in trained] == [
        *((1, step) for step in range(5)),
        *((2, step) for step in range(3, STEPS)),
    ]
    resumed = final_checkpoint(terminals, incarnation=2)
    expected, found = training_state(uninterrupted), training_state(resumed)
    assert any(name.endswith("exp_avg_sq") for name in expected)
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    rng = Path("rng", "rank_0.msgpack")
    assert (resumed / rng).read_bytes() == (uninterrupted / rng).read_bytes()
    model = "model.safetensors"
    assert (resumed / model).read_bytes() == (uninterrupted / model).read_bytes()


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    terminals: Terminals, url: str, uninterrupted: Path
) -> None:
    with scripted_worker(url, terminals) as worker:
        first = start_learner(terminals, url)
        worker.answer(range(STEPS))
        first.succeeds()
    damaged = final_checkpoint(terminals, incarnation=1)
    flip_bits(damaged / "training_state" / "__0_0.distcp")
    second = start_learner(terminals, url, "--resume")
    second.succeeds()
    assert f"{damaged.name} is damaged: training_state/__0_0.distcp has other bytes than were written." in second.said
    assert "Going back to the checkpoint before." in second.said
    resumed, expected = training_state(final_checkpoint(terminals, incarnation=2)), training_state(uninterrupted)
    assert [name for name in expected if not torch.equal(expected[name], resumed[name])] == []


@pytest.mark.slow
def test_a_run_goes_on_after_its_learner_was_killed(terminals: Terminals, url: str) -> None:
    recipe = write_recipe(
        terminals.directory("learner"),
        learner={"steps": 30, "groups_per_step": 4, "group_size": 4},
        checkpoint={"every_steps": 10},
    )
    workers = terminals.open("workers", "workers", "--count", "2", "--broker", url, "--run", "killed")
    arguments = ("learner", recipe, "--broker", url, "--run", "killed")
    with watching(url, "killed", terminals) as watch:
        learner = terminals.open("learner", *arguments)
        watch.until_step(13)
        watch.until_durable(terminals.root / "learner" / "runs" / "killed" / "checkpoints" / "1" / "step_10")
        learner.send(signal.SIGKILL)
        assert learner.wait() == -signal.SIGKILL
        resumed = terminals.open("learner", *arguments, "--resume")
        watch.until("it has ended", lambda status: status.state == "finished")
    resumed.succeeds()
    workers.succeeds()
    run = terminals.root / "learner" / "runs" / "killed"
    check_trained(run, steps=30, trajectories_per_step=16, max_lag=2)
    assert {line["incarnation"] for line in lines(run / "trained.jsonl")} == {1, 2}
    assert min(line["step"] for line in lines(run / "trained.jsonl") if line["incarnation"] == 2) == 10
    assert {version.incarnation for version in watch.announced} == {1, 2}
    assert watch.announced == sorted(watch.announced)
    assert [version.step for version in watch.announced] == sorted(version.step for version in watch.announced)
