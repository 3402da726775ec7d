"""The next broadcast group has the workers that hold a version and answer; others follow by pull."""

from typing import Any

import msgspec

from headway.broker.schema import WeightVersion
from headway.broker.schema.status import WorkerInfo
from headway.weightsync.sender import Member, eligible, follows_by_pull, still_missed
from tests.weightsync.worker_process import worker_info

V1, V2 = WeightVersion(1, 1), WeightVersion(1, 2)


def info(worker: str, version: WeightVersion | None = V1, **changes: Any) -> WorkerInfo:
    return msgspec.structs.replace(worker_info(worker, version, 0), pid=1, host="h", **changes)


def member(worker: str) -> Member:
    return Member(worker, "h", 1)


def test_those_who_hold_a_version_take_part_in_order_of_their_names() -> None:
    workers = [info("b"), info("a"), info("new", None), info("shy", wants_broadcast=False)]
    assert eligible(workers, {}) == (member("a"), member("b"))


def test_who_is_in_no_group_and_stays_follows_by_pull() -> None:
    assert follows_by_pull(info("far", wants_broadcast=False))
    assert not follows_by_pull(info("near"))
    assert not follows_by_pull(info("joiner", None))
    assert not follows_by_pull(info("leaving", wants_broadcast=False, state="draining"))


def test_those_who_drain_do_not() -> None:
    assert eligible([info("a", state="draining"), info("b")], {}) == (member("b"),)


def test_a_dropped_member_rejoins_once_it_has_caught_up() -> None:
    missed = {"a": V2}
    assert eligible([info("a", V1)], missed) == ()
    assert still_missed([info("a", V1)], missed) == missed
    assert eligible([info("a", V2)], missed) == (member("a"),)
    assert still_missed([info("a", V2)], missed) == {}
    assert eligible([info("a", WeightVersion(2, 0))], missed) == (member("a"),)


def test_who_is_gone_is_forgotten() -> None:
    assert still_missed([info("b")], {"a": V2}) == {}


def test_a_process_that_was_restarted_is_another_member() -> None:
    both = eligible([info("a"), info("b")], {})
    restarted = eligible([info("a"), msgspec.structs.replace(info("b"), pid=2)], {})
    assert [one.worker for one in restarted] == [one.worker for one in both]
    assert restarted != both
