"""Real crashes in the middle of a sample: exactly one other worker continues it after its last segment."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.broker import BlockingBroker
from headway.broker.client.learner import CheckpointMark, Owner, TakenBatch
from headway.broker.schema import Group, Prompt, RunRules, Trajectory
from headway.broker.schema.status import WorkerInfo
from tests.processes import tethered

from .slow_worker import LENGTH, PROMPT_TOKENS, VERSION, logprob_of, manifest

pytestmark = pytest.mark.slow

DEADLINE_S = 240.0
GOOD_START = 30
"""Tokens of a sample after which the test strikes its worker; by then most of them are in segments of four."""
BASES = {"killed": 1000, "stalled": 2000, "heir": 3000}

START = Callable[[str, int], subprocess.Popen[bytes]]


@pytest.fixture
def start(url: str, run_name: str) -> Iterator[START]:
    """Yield a function that starts a worker by its name, with a capacity."""
    started: list[subprocess.Popen[bytes]] = []

    def start_one(name: str, capacity: int) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "tests.end_to_end.slow_worker", url, run_name, name]
        argv += [str(BASES[name]), str(capacity)]
        started.append(subprocess.Popen(tethered(*argv), cwd=Path(__file__).parents[2]))
        return started[-1]

    yield start_one
    for process in started:
        process.kill()
        process.wait()


def test_samples_of_a_killed_and_of_a_stalled_worker_are_gone_on_with(blocking: BlockingBroker, start: START) -> None:
    broker, call = blocking.broker, blocking.call
    rules = RunRules(max_lag=4, groups_per_step=1)
    owner = call(broker.batches.claim(checkpoint=CheckpointMark(0, 0), rules=rules, config=b"", resume=False)).owner
    call(broker.prompts.feed([prompt()], owner))
    struck = {name: start(name, 1) for name in ("killed", "stalled")}
    heir = start("heir", 2)
    until(lambda: len(workers(blocking)) == 3)
    # Workers may generate only now: the two that will be struck get their samples first.
    heir.send_signal(signal.SIGSTOP)
    call(broker.versions.announce(owner, manifest()))
    until(lambda: all(generated(blocking, name) >= GOOD_START for name in struck))
    struck["killed"].kill()
    struck["stalled"].send_signal(signal.SIGSTOP)
    heir.send_signal(signal.SIGCONT)

    until(lambda: active(blocking, "heir") == 2)
    struck["stalled"].send_signal(signal.SIGCONT)
    (group,) = until(lambda: taken_groups(blocking, owner))
    until(lambda: active(blocking, "stalled") == 0)
    assert workers(blocking)["stalled"].submitted == 0

    before = [resumed(trajectory) for trajectory in group.trajectories]
    assert all(GOOD_START - 4 <= count < LENGTH for count in before)
    queues = call(broker.status.snapshot()).queues
    assert (queues.resumed_tokens, queues.expired_leases) == (sum(before), 2)
    until(lambda: generated(blocking, "heir") == 2 * LENGTH - sum(before))


def resumed(trajectory: Trajectory) -> int:
    """Return how many tokens the heir did not generate, and check that each token fits its place and its worker."""
    assert trajectory.worker == "heir"
    tokens = trajectory.response_tokens.tolist()
    owners = [token // 1000 * 1000 for token in tokens]
    first = owners[0]
    count = owners.count(first)
    assert first in (BASES["killed"], BASES["stalled"])
    assert owners == [first] * count + [BASES["heir"]] * (LENGTH - count)
    assert [token % 1000 for token in tokens] == list(range(LENGTH))
    assert trajectory.behavior_logprobs.tolist() == [logprob_of(token) for token in tokens]
    assert [(span.start, span.end, span.version) for span in trajectory.spans] == [(0, LENGTH, VERSION)]
    return count


def prompt() -> Prompt:
    return Prompt(
        group="0000-00000000",
        token_ids=PROMPT_TOKENS,
        text="",
        ground_truth="",
        data_source="test",
        num_samples=2,
    )


def workers(blocking: BlockingBroker) -> dict[str, WorkerInfo]:
    return {info.worker: info for info in blocking.call(blocking.broker.status.workers())}


def taken_groups(blocking: BlockingBroker, owner: Owner) -> tuple[Group, ...]:
    """Return the groups of step 0; none while they are not ready."""
    taken = blocking.call(blocking.broker.batches.take(owner, 0, 1))
    return taken.groups if isinstance(taken, TakenBatch) else ()


def generated(blocking: BlockingBroker, name: str) -> int:
    """Return the worker's count of tokens; 0 once its last heartbeat has expired."""
    info = workers(blocking).get(name)
    return info.generated_tokens if info else 0


def active(blocking: BlockingBroker, name: str) -> int | None:
    info = workers(blocking).get(name)
    return info.active if info else None


def until(look: Callable[[], Any]) -> Any:
    """Return the first true answer. Raises AssertionError where none comes in time."""
    deadline = time.monotonic() + DEADLINE_S
    while not (seen := look()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return seen
