"""A run is started anew under its name while a worker of the abandoned run goes on; the worker joins the new run."""

import os
import signal
from pathlib import Path

import pytest

from headway.broker.schema.status import WorkerInfo
from headway.deploy.run.record import TRAINED, TrainedLine, read_lines
from headway.deploy.run.run_directory import identity_of

from .recipes import write_recipe
from .records import check_trained
from .terminals import Terminal, Terminals
from .watching import watching

pytestmark = pytest.mark.slow

RUN, STEPS, ABANDONED_AT = "again", 120, 8


def test_a_leftover_worker_joins_the_new_run_and_brings_nothing_of_the_old_one(terminals: Terminals, url: str) -> None:
    connection = {"HEADWAY_BROKER": url, "HEADWAY_RUN": RUN}
    recipe = write_recipe(
        terminals.directory("learner"),
        learner={"steps": 1000, "groups_per_step": 4, "group_size": 4},
        engine={"max_concurrent": 4},
        checkpoint={"every_steps": 40},
    )
    run = terminals.root / "learner" / "runs" / RUN
    leftover = terminals.open("leftover", "worker", **connection)
    abandoned = terminals.open("learner", "learner", recipe, **connection)
    with watching(url, RUN, terminals) as watch:
        watch.until_step(ABANDONED_AT)
        old = identity_of(run)
        abandoned.send(signal.SIGKILL)
        abandoned.wait()

    newcomer = terminals.open("newcomer", "worker", **connection)
    learner = terminals.open(
        "learner", "learner", recipe, f"learner.steps={STEPS}", "--overwrite", "--force", **connection
    )
    with watching(url, RUN, terminals) as watch:
        watch.until(
            "both work for the new run",
            lambda status: status.identity not in ("", old) and len([w for w in status.workers if is_up(w)]) == 2,
        )
    learner.succeeds()
    leftover.succeeds()
    newcomer.succeeds()

    new = identity_of(run)
    assert new != old
    check_trained(run, steps=STEPS, trajectories_per_step=16, max_lag=2)
    assert {line.identity for line in read_lines(run / TRAINED, TrainedLine)} == {new}
    assert "This process starts anew" in leftover.said
    assert starts_of(leftover) == 2
    assert "left out" not in learner.said, "a broadcast waited for a worker of another run"
    assert checkpoints(run) == {"1"}


def is_up(info: WorkerInfo) -> bool:
    return info.version is not None


def starts_of(terminal: Terminal) -> int:
    """Return how often the worker's engine came up."""
    return terminal.said.count("engine embedded is up")


def checkpoints(run: Path) -> set[str]:
    """Return the incarnations that left a checkpoint."""
    return {name for name in os.listdir(run / "checkpoints") if name.isdecimal()}
