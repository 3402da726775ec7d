"""Publisher and workers as processes: joining, dying, freezing."""

import signal
import threading
from collections.abc import Callable

import pytest

from tests.weightsync.conftest import Learner, WorkerProcess

pytestmark = pytest.mark.slow


def test_workers_join_receive_and_die(learner: Learner, start_worker: Callable[[str], WorkerProcess]) -> None:
    one, two = start_worker("one"), start_worker("two")
    assert learner.publish().members == ()  # no worker held a version before: all pull
    for worker in (one, two):
        worker.expect(learner.version)
    learner.until_held("one", "two")

    report = learner.publish()
    assert (report.members, report.failed) == (("one", "two"), "")
    first_epoch = learner.epoch()
    for worker in (one, two):
        worker.expect(learner.version)
    assert learner.publish().members == ("one", "two")
    assert learner.epoch() == first_epoch

    three = start_worker("three")
    three.expect(learner.version)  # by pull: nothing was published meanwhile
    learner.until_held("one", "two", "three")
    assert learner.publish().members == ("one", "three", "two")
    assert learner.epoch() == first_epoch + 1

    two.send(signal.SIGKILL)
    report = learner.publish()
    assert "two" not in report.members
    assert "two" in report.failed
    for worker in (one, three):
        worker.expect(learner.version)
    learner.until_held("one", "three")
    assert learner.publish().members == ("one", "three")
    assert learner.epoch() > first_epoch + 1


def two_holders(learner: Learner, start_worker: Callable[[str], WorkerProcess]) -> tuple[WorkerProcess, WorkerProcess]:
    """Return two workers, both of which hold the first version."""
    one, two = start_worker("one"), start_worker("two")
    learner.publish()
    learner.until_held("one", "two")
    return one, two


def test_a_frozen_worker_costs_one_deadline_and_catches_up(
    learner: Learner, start_worker: Callable[[str], WorkerProcess]
) -> None:
    one, two = two_holders(learner, start_worker)
    assert learner.publish().members == ("one", "two")
    learner.until_held("one", "two")

    two.send(signal.SIGSTOP)
    report = learner.publish()
    assert "two" not in report.members
    learner.until_held("one")
    one.expect(learner.version)
    report = learner.publish()  # dropped: the worker costs nothing any more, although its heartbeat has not expired
    assert (report.members, report.failed) == (("one",), "")

    two.send(signal.SIGCONT)
    two.expect(learner.version)
    learner.until_held("one", "two")
    assert learner.publish().members == ("one", "two")


def test_a_member_that_freezes_before_the_group_forms_is_left_out(
    learner: Learner, start_worker: Callable[[str], WorkerProcess]
) -> None:
    one, two = two_holders(learner, start_worker)
    two.send(signal.SIGSTOP)
    report = learner.publish()
    assert report.members == ("one",)
    assert "absent after" in report.failed
    two.send(signal.SIGCONT)
    two.expect(learner.version)
    one.expect(learner.version)


def test_a_worker_killed_while_versions_flow_stops_nobody(
    learner: Learner, start_worker: Callable[[str], WorkerProcess]
) -> None:
    one, two = two_holders(learner, start_worker)
    assert learner.publish().members == ("one", "two")
    killer = threading.Timer(0.3, two.send, [signal.SIGKILL])
    killer.start()
    reports = [learner.publish() for _ in range(40)]
    killer.join()
    while reports[-1].members != ("one",):  # a fast machine is done with 40 before the kill
        learner.until_held("one")
        reports.append(learner.publish())
    one.expect(learner.version)
