"""Spans of real processes: learner and workers send their last ones to a collector as they stop."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.deploy.observe.tracing.spans import ids_of_trajectory
from headway.learner.experience.log import ExperienceLog
from tests.collector import Collector, Received, collecting

from .recipes import write_recipe
from .records import lines
from .terminals import DEADLINE_S, Terminal, Terminals

pytestmark = pytest.mark.slow

RUN, STEPS = "traced", 3
NEVER_MS = "600000"
"""The interval between two batches of spans, so long that only the end of a process sends any."""
SCORES = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return solution_str.count("7") / 16
"""


def test_what_is_told_to_stop_sends_its_last_spans(url: str, terminals: Terminals) -> None:
    with collecting() as collector:
        learner = open_learner(terminals, url, collector)
        worker = open_worker(terminals, url, collector)
        trained = terminals.root / "learner" / "runs" / RUN / "trained.jsonl"
        until(lambda: trained.exists() and len(lines(trained)) >= STEPS, learner, worker)
        assert not collector.spans
        learner.send(signal.SIGTERM)
        assert learner.wait() == 0, learner.tail()
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0, worker.tail()
    check_steps(collector, trained.parent)
    check_trajectories(collector, trained.parent)


def open_learner(terminals: Terminals, url: str, collector: Collector) -> Terminal:
    """Start the learner of a run whose environment asks for a second turn wherever the first has ended by itself."""
    recipe = write_recipe(
        terminals.directory("learner"),
        rewards=[{"kind": "scores:compute_score"}],
        environment={"kind": "second_try", "options": {"hint": "{prompt}"}},
        learner={"steps": 10_000, "groups_per_step": 2, "group_size": 4},
        sampling={"max_new_tokens": 48},
        engine={"max_concurrent": 8, "max_model_len": 64},
    )
    variables = {**collector.environment, "OTEL_BSP_SCHEDULE_DELAY": NEVER_MS}
    return terminals.open("learner", "learner", recipe, "--broker", url, "--run", RUN, **variables)


def open_worker(terminals: Terminals, url: str, collector: Collector) -> Terminal:
    (terminals.directory("worker") / "scores.py").write_text(SCORES)
    variables = {**collector.environment, "OTEL_BSP_SCHEDULE_DELAY": NEVER_MS}
    return terminals.open("worker", "worker", "--broker", url, "--run", RUN, **variables)


def until(is_so: Callable[[], object], *running: Terminal) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline, "waited in vain"
        assert all(terminal.exit_code() is None for terminal in running), [terminal.tail() for terminal in running]
        time.sleep(0.02)


def check_steps(collector: Collector, run: Path) -> None:
    """Check that each trained step has one span, with its phases below it and links to its trajectories."""
    steps = {span.attributes["headway.step"]: span for span in collector.named("step")}
    trained = {line["step"]: line["tids"] for line in lines(run / "trained.jsonl")}
    assert steps.keys() == trained.keys()
    assert len(collector.named("step")) == len(trained)
    for number, step in steps.items():
        phases = [phase.name for phase in collector.below(step)]
        assert [phase for phase in phases if phase != "evaluate"] == ["checkpoint", "take", "pack", "train", "publish"]
        assert sorted(link.trajectory for link in step.links) == sorted(trained[number])
        linked = {link.trajectory: (link.trace, link.span) for link in step.links}
        assert linked == {tid: (root.trace, root.span) for tid in linked for root in [root_of(collector, tid)]}


def check_trajectories(collector: Collector, run: Path) -> None:
    """Check that each trained trajectory has one trace with its turns, each generated and scored."""
    log, several = ExperienceLog(run / "experience"), 0
    for line in lines(run / "trained.jsonl"):
        for group in log.read(line["step"]) or []:
            for trajectory in group.trajectories:
                root = root_of(collector, str(trajectory.tid))
                ids = ids_of_trajectory(trajectory.identity, trajectory.tid)
                assert (int(root.trace, 16), int(root.span, 16)) == ids
                turns = [turn for turn in collector.below(root) if was_scored(collector, turn)]
                assert [turn.attributes["headway.turn"] for turn in turns] == list(range(len(trajectory.turns) or 1))
                several += len(turns) > 1
    assert several, "some answers end by themselves, and are asked for again"


def was_scored(collector: Collector, turn: Received) -> bool:
    return (turn.name, [phase.name for phase in collector.below(turn)]) == ("turn", ["generate", "score"])


def root_of(collector: Collector, tid: str) -> Received:
    (root,) = [root for root in collector.named("trajectory") if root.attributes["headway.trajectory"] == tid]
    assert root.parent == ""
    return root
