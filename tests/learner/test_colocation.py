# mypy: disable-error-code="list-item"
"""The learner's side of turns: it is never on the device together with engines, and waits until engines sleep."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.broker import BlockingBroker
from headway.broker.client import engine_pauses
from headway.broker.client.engine_pauses import Phases
from headway.broker.client.learner import CheckpointMark, Owner
from headway.broker.schema import RunRules
from headway.broker.server.embedded import EmbeddedServer
from headway.learner.experience.broker_retries import StopRequested
from headway.learner.ranks import Ranks
from headway.learner.stages import device_lock
from headway.learner.stages.device_lock import DeviceLock, wait_for_device

from .test_experience import experience, forget_everything

LONG_S = 1000.0


@pytest.fixture
def owner(blocking: BlockingBroker) -> Owner:
    rules = RunRules(max_lag=0, groups_per_step=1)
    claim = blocking.broker.batches.claim(checkpoint=CheckpointMark(0, 0), rules=rules, config=b"", resume=False)
    return blocking.call(claim).owner


class Model:
    """A model that notes whether it is on the device."""

    is_here = True

    @contextmanager
    def off_device(self) -> Iterator[None]:
        self.is_here = False
        yield
        self.is_here = True


def of_one_rank(blocking: BlockingBroker, owner: Owner, *models: Any) -> DeviceLock:
    """Return a device for one rank, whose experience only asks the broker."""
    asks: Any = SimpleNamespace(owner=owner, retry=lambda verb: blocking.call(verb()))
    return DeviceLock(blocking.broker.phases, models, Ranks(0, 1, 0, 1, True), asks)


class Clock:
    """A clock that moves only in sleeps and outages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time_s = 0.0
        monkeypatch.setattr(device_lock, "time", SimpleNamespace(monotonic=lambda: self.time_s, sleep=self.advance))

    def advance(self, seconds: float) -> None:
        self.time_s += seconds

    def answers(self, left: list[Any]) -> Callable[..., Any]:
        """Return a verb with these answers, one after the other; before None there is a long outage."""

        async def answer(*arguments: Any) -> Any:
            given = left.pop(0)
            self.advance(1e6 if given is None else 0)
            return given

        return answer


def interrupted(owner: Owner) -> Any:
    """Return an experience that is asked to stop while the broker is away."""

    def retry(verb: Callable[[], object]) -> object:
        raise StopRequested

    return SimpleNamespace(owner=owner, retry=retry)


def may_generate(blocking: BlockingBroker, ttl_s: float = LONG_S, *, is_awake: bool = False) -> bool:
    return blocking.call(blocking.broker.phases.may_generate("w", ttl_s, is_awake=is_awake))


@contextmanager
def soon(act: Callable[[], object]) -> Iterator[None]:
    """Do this a little later, and within the block."""
    begun = threading.Event()

    def begin() -> None:
        begun.set()
        act()

    timer = threading.Timer(0.3, begin)
    timer.start()
    yield
    assert begun.is_set()
    timer.join()


def test_engines_have_the_device_while_no_model_is_there(blocking: BlockingBroker, owner: Owner) -> None:
    models, seen = [Model(), Model()], list[bool]()
    turns = of_one_rank(blocking, owner, *models)
    assert not may_generate(blocking)

    def fall_asleep() -> None:
        seen.extend([may_generate(blocking, is_awake=True), any(model.is_here for model in models)])
        blocking.call(blocking.broker.phases.fell_asleep("w"))

    for _ in range(2):
        with soon(fall_asleep), turns.released():
            assert may_generate(blocking)
            assert not any(model.is_here for model in models)
        assert all(model.is_here for model in models)
        assert not may_generate(blocking)
    assert seen == [False, False] * 2


def test_a_worker_that_died_is_waited_for_no_longer_than_it_counts(blocking: BlockingBroker, owner: Owner) -> None:
    model = Model()
    with of_one_rank(blocking, owner, model).released():
        assert may_generate(blocking, 0.3)
    assert model.is_here


def test_one_that_lives_and_hangs_is_not_waited_for_for_ever(
    blocking: BlockingBroker, owner: Owner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device_lock, "LONGEST_WAIT_S", 0.2)
    model = Model()
    with of_one_rank(blocking, owner, model).released():
        assert may_generate(blocking)
    assert model.is_here
    assert "w did not leave the device" in caplog.text


def test_an_outage_is_no_time_in_which_an_engine_could_have_fallen_asleep(
    blocking: BlockingBroker, owner: Owner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, answers = Model(), [("w",), None, ("w",), None, ("w",), ()]
    monkeypatch.setattr(blocking.broker.phases, "train", Clock(monkeypatch).answers(answers))
    with of_one_rank(blocking, owner, model).released():
        pass
    assert model.is_here
    assert not answers
    assert not caplog.records


def test_engines_that_the_server_has_forgotten_are_waited_for(
    server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server comes back, and the learner asks it before the worker does."""
    monkeypatch.setattr(engine_pauses, "AWAKE_S", LONG_S)
    model, answers, seen = Model(), list[object](), list[bool]()
    was_answered, is_named = threading.Event(), threading.Event()

    def live_on() -> None:
        was_answered.wait(240)
        may_generate(worker, is_awake=True)
        seen.append(model.is_here)
        monkeypatch.setattr(engine_pauses, "AWAKE_S", 0.0)
        is_named.wait(240)
        seen.append(model.is_here)
        worker.call(worker.broker.phases.fell_asleep("w"))

    with experience(server.url, CheckpointMark(0, 0), lambda: False) as (learner, blocking):
        worker, living = BlockingBroker(server.url, "run"), threading.Thread(target=live_on)
        train = blocking.broker.phases.train

        async def noted(owner: Owner) -> tuple[str, ...] | None:
            answer = await train(owner)
            answers.append(answer)
            was_answered.set()
            if answer:
                is_named.set()
            return answer

        monkeypatch.setattr(blocking.broker.phases, "train", noted)
        with DeviceLock(blocking.broker.phases, [model], Ranks(0, 1, 0, 1, True), learner).released():
            assert may_generate(worker)
            forget_everything(server, tmp_path / "server")
            living.start()
        living.join()
        worker.close()
    assert seen == [False, False]
    assert (answers[0], answers[-2:]) == (None, [("w",), ()])
    assert model.is_here


def test_a_phase_lasts_as_long_as_it_is_renewed(
    blocking: BlockingBroker, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = blocking.broker.phases.generate
    monkeypatch.setattr(blocking.broker.phases, "generate", partial(generate, ttl_s=0.5))
    monkeypatch.setattr(device_lock, "RENEW_S", 0.05)
    turns = of_one_rank(blocking, owner)
    with turns.released():
        for _ in range(20):
            turns.renew()
            time.sleep(0.05)
        assert may_generate(blocking)
        while may_generate(blocking, is_awake=True):
            time.sleep(0.05)
        blocking.call(blocking.broker.phases.fell_asleep("w"))


def test_a_failure_leaves_the_device_to_engines(blocking: BlockingBroker, owner: Owner) -> None:
    """The device may have no memory for the learner's model."""
    model = Model()
    with pytest.raises(ZeroDivisionError), of_one_rank(blocking, owner, model).released():
        raise ZeroDivisionError
    assert not model.is_here


def test_a_learner_that_stops_without_a_broker_leaves_the_device_to_engines(
    blocking: BlockingBroker, owner: Owner
) -> None:
    """No answer says whether engines sleep, and waiting would not make them sleep."""
    model = Model()
    turns = of_one_rank(blocking, owner, model)

    def be_interrupted() -> None:
        with turns.released():
            assert may_generate(blocking)
            turns._experience = interrupted(owner)

    with pytest.raises(StopRequested):
        be_interrupted()
    assert not model.is_here


def test_a_learner_that_starts_waits_until_the_device_is_free(
    blocking: BlockingBroker, owner: Owner, url: str, run_name: str
) -> None:
    wait_for_device(url, run_name)
    blocking.call(blocking.broker.phases.generate(owner, 0.2))
    assert may_generate(blocking)
    with soon(lambda: blocking.call(blocking.broker.phases.fell_asleep("w"))):
        wait_for_device(url, run_name)
    assert not may_generate(blocking)


def test_a_learner_that_starts_waits_where_nobody_can_say_whether_it_is_free(
    url: str, run_name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = [None, True, None, True, False]
    monkeypatch.setattr(Phases, "are_engines_awake", Clock(monkeypatch).answers(answers))
    wait_for_device(url, run_name)
    assert not answers
    assert not caplog.records
