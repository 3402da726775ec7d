"""Learner and engines take turns on the device, never both at once, and the run ends in spite of kills and stops."""

import os
import shutil
import signal
import time
from collections.abc import Callable

import pytest

from headway.broker.server.embedded import EmbeddedServer
from tests.processes import children_left, kill

from . import witness
from .recipes import write_recipe
from .records import check_trained, lines, summary
from .terminals import DEADLINE_S, Terminal, Terminals, paused
from .test_run import learner_below
from .witness import FILE, Event, events

pytestmark = pytest.mark.slow

RANKS = 2


class Run:
    """One colocated run with a witness."""

    def __init__(
        self,
        terminals: Terminals,
        *,
        max_lag: int,
        steps: int,
        tokens: int = 16,
        ranks: int = 1,
        url: str = "embedded",
    ) -> None:
        self.home = terminals.directory("run")
        self.directory = self.home / "runs" / "tiny"
        shutil.copy(witness.__file__, self.home / "my_witness.py")
        self._terminals = terminals
        self._max_lag, self._steps = max_lag, steps
        self._recipe = write_recipe(
            self.home,
            run={"placement": "colocated"},
            staleness={"max_lag": max_lag},
            learner={"steps": steps, "processes": ranks, "backend": "my_witness:Backend"},
            engine={"kind": "my_witness:Engine", "max_model_len": 128},
            sampling={"max_new_tokens": tokens},
            checkpoint={"every_steps": 3},
            broker={"url": url},
        )
        self._witnessed = self.home / "none"

    def start(self, *arguments: str) -> Terminal:
        self._witnessed = self.home / f"events{len(list(self.home.glob('events*')))}"
        self._witnessed.touch()
        return self._terminals.open("run", "run", self._recipe, *arguments, **{FILE: str(self._witnessed)})

    def events(self) -> list[Event]:
        return events(self._witnessed)

    def until(self, is_it: Callable[[Event], bool], after: int = 0, times: int = 1) -> Event:
        """Return the event of this kind that is the last of so many, when so many are there already.

        It polls seldom enough to leave the cores to the run.
        """

        def found() -> list[Event]:
            return [event for event in self.events()[after:] if is_it(event)]

        self._until(lambda: len(found()) >= times, lambda: self.events()[-20:])
        return found()[times - 1]

    def until_learner_says(self, words: str) -> None:
        """Wait for these words in the learner's log."""
        log = self.directory / "logs/learner.log"
        self._until(lambda: words in log.read_text(), lambda: log.read_text()[-2000:])

    def _until(self, is_so: Callable[[], bool], seen: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not is_so():
            self._terminals.check()
            assert time.monotonic() < deadline, seen()
            time.sleep(0.01)

    def check(self) -> None:
        """Assert that the run trained as it should, and that learner and engines were never on the device together."""
        check_trained(self.directory, steps=self._steps, trajectories_per_step=16, max_lag=self._max_lag)
        for path in self.home.glob("events*"):
            check_turns(events(path))


def check_turns(found: list[Event]) -> None:
    """Assert that engines are there, and sample, only while every rank of the learner has left."""
    there, asleep = set[int](), set[int]()
    for event in found:
        match event.what:
            case "began" | "back":
                there.add(event.pid)
            case "leaves":
                there.discard(event.pid)
            case "asleep":
                asleep.add(event.pid)
            case "awake":
                assert not there, event
                asleep.discard(event.pid)
            case _:
                assert not there, event
                assert event.pid not in asleep, event
    assert {event.what for event in found} >= {"began", "leaves", "back", "opened", "awake", "sampled", "asleep"}


def test_on_policy_over_two_ranks(terminals: Terminals) -> None:
    run = Run(terminals, max_lag=0, steps=4, ranks=RANKS)
    run.start().succeeds()
    run.check()
    back = [event for event in run.events() if event.what == "back"]
    assert len(back) == RANKS * 4
    for step in lines(run.directory / "metrics.jsonl"):
        assert step["algorithm"]["ratio_max_deviation"] <= 1e-4
        assert step["mixed_version_trajectories"] == 0


def test_what_runs_when_a_batch_is_there_is_set_aside_and_gone_on_with(terminals: Terminals) -> None:
    run = Run(terminals, max_lag=2, steps=6, tokens=60)
    run.start().succeeds()
    run.check()
    assert summary(run.directory)["resumed_tokens"] > 0
    assert summary(run.directory)["mixed_version_trajectories"] > 0


def test_workers_that_are_killed_asleep_and_at_work_hold_nobody_up(terminals: Terminals) -> None:
    run = Run(terminals, max_lag=0, steps=8)
    headway = run.start()
    sleeper = run.until(lambda event: event.what == "asleep")
    os.kill(sleeper.pid, signal.SIGKILL)
    count = len(run.events())
    at_work = run.until(lambda event: event.what == "sampled" and event.pid != sleeper.pid, after=count)
    os.kill(at_work.pid, signal.SIGKILL)
    headway.succeeds()
    run.check()
    assert summary(run.directory)["worker_restarts"] == 2


def test_a_learner_that_is_killed_while_it_trains_is_resumed(terminals: Terminals) -> None:
    run = Run(terminals, max_lag=0, steps=7)
    headway = run.start()
    run.until(lambda event: event.what == "back", times=5)
    os.kill(learner_below(headway), signal.SIGKILL)
    assert headway.wait() == 1
    assert children_left() == []
    run.start("--resume").succeeds()
    run.check()
    assert {line["incarnation"] for line in lines(run.directory / "trained.jsonl")} == {1, 2}


@pytest.mark.parametrize("phase", ["sampled", "back"])
def test_ctrl_c_in_each_phase_ends_in_order(terminals: Terminals, phase: str) -> None:
    run = Run(terminals, max_lag=0, steps=100)
    headway = run.start()
    run.until(lambda event: event.what == "awake")
    run.until(lambda event: event.what == phase, after=len(run.events()))
    headway.send(signal.SIGINT)
    assert headway.wait() == 128 + signal.SIGINT, headway.tail()
    assert children_left() == []
    check_turns(run.events())
    steps = summary(run.directory)["steps"]
    assert (run.directory / "checkpoints" / "1" / f"step_{steps}" / "learner.json").exists()


def test_a_learner_that_is_stopped_while_the_broker_is_away_leaves_the_device_to_engines(
    terminals: Terminals, server: EmbeddedServer
) -> None:
    """The engines stay awake as long as the broker is away."""
    run = Run(terminals, max_lag=0, steps=4, tokens=60, ranks=RANKS, url=server.url)
    headway = run.start()
    run.until(lambda event: event.what == "back")
    at_work = run.until(lambda event: event.what == "sampled", after=len(run.events()))
    with paused(at_work.pid):  # the batch must not be complete before the broker is away
        kill(server)
    headway.send(signal.SIGINT)
    run.until_learner_says("Engines may still be on the device: stopping without a checkpoint")
    server.start()  # workers would try to hand their samples back for as long as they are given
    assert headway.wait() == 128 + signal.SIGINT, headway.tail()
    assert "back" not in {event.what for event in run.events() if event.at_s > at_work.at_s}
    run.start("--resume").succeeds()
    run.check()
    trained = lines(run.directory / "trained.jsonl")
    assert [(line["incarnation"], line["step"]) for line in trained] == [(1, 0), *((2, step) for step in range(4))]
    assert trained[0]["tids"] == trained[1]["tids"]
