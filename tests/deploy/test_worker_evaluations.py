"""The learner takes the evaluations that workers made for it, and goes on where they made none."""

import logging
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import pytest

from headway.broker.client.evaluations import EvaluationProgress, EvaluationResult
from headway.broker.schema import Prompt, WeightVersion
from headway.deploy.observe.sinks.base import Sinks
from headway.deploy.recipe.resolve import load_recipe
from headway.deploy.roles import held_out_evaluation
from headway.deploy.roles.held_out_evaluation import WorkerEvaluations
from headway.deploy.roles.observer import RunObserver
from headway.deploy.run.events import EvaluationEvent, Event
from headway.learner.experience.broker_retries import StopRequested
from headway.learner.experience.stream import Experience

RECIPE = load_recipe("arithmetic.yaml", ["evaluation.where=workers", "evaluation.every_steps=10", "learner.steps=20"])
LONG_S = 1e6
HELD_OUT = [
    Prompt(group=f"h{n}", token_ids=[1], text="", ground_truth="", data_source="", num_samples=1) for n in range(2)
]
V0, V10, V11, V20 = (WeightVersion(1, step) for step in (0, 10, 11, 20))
HALF = (EvaluationResult(True, 1.0, 3), EvaluationResult(False, 0.0, 5))


class Server:
    """The evaluations that an `Experience` reports."""

    def __init__(self) -> None:
        self.held: dict[WeightVersion, EvaluationProgress] = {}
        self.asked: list[WeightVersion] = []
        self.experience: Any = Mock(spec=Experience)
        self.experience.ask_to_evaluate.side_effect = self._ask
        self.experience.evaluation.side_effect = lambda version: self.held.get(version)
        self.experience.end_evaluation.side_effect = self._end
        self.skipped: list[WeightVersion] = []

    def _end(self, version: WeightVersion, *, is_skipped: bool) -> None:
        self.held.pop(version, None)
        if is_skipped:
            self.skipped.append(version)

    def _ask(self, version: WeightVersion, prompts: Sequence[Prompt], samples: int, keep_s: float) -> None:
        assert (list(prompts), samples, keep_s) == (HELD_OUT, 1, RECIPE.evaluation.hold_s)
        self.asked.append(version)
        self.set(version, 0)

    def set(self, version: WeightVersion, done: int, quiet_s: float = 0.0) -> None:
        self.held[version] = EvaluationProgress(2, done, 0, quiet_s, HALF if done == 2 else ())


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def evaluations(server: Server) -> WorkerEvaluations:
    return WorkerEvaluations(RECIPE, server.experience, HELD_OUT)


def collected(evaluations: WorkerEvaluations) -> list[tuple[WeightVersion, float]]:
    return [(version, result.pass_rate) for version, result in evaluations.collect()]


def test_a_result_comes_once_all_samples_are_in(server: Server, evaluations: WorkerEvaluations) -> None:
    evaluations.publishes(V10, is_due=True)
    evaluations.publishes(V11, is_due=False)
    assert server.asked == [V10]
    server.set(V10, 1)
    assert collected(evaluations) == []
    server.set(V10, 2)
    assert collected(evaluations) == [(V10, 0.5)]
    assert (server.held, evaluations.pending, collected(evaluations)) == ({}, (), [])


def test_results_come_in_the_order_of_the_versions(server: Server, evaluations: WorkerEvaluations) -> None:
    for version in (V0, V10):
        evaluations.publishes(version, is_due=True)
    server.set(V10, 2)
    assert collected(evaluations) == []
    server.set(V0, 2)
    assert collected(evaluations) == [(V0, 0.5), (V10, 0.5)]


@pytest.mark.parametrize("is_lost", [False, True])
def test_what_nobody_can_complete_is_skipped_and_counted(
    server: Server, evaluations: WorkerEvaluations, is_lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    evaluations.publishes(V0, is_due=True)
    server.set(V0, 1, quiet_s=LONG_S)
    assert collected(evaluations) == []  # this version is the newest, so workers may still evaluate it
    evaluations.publishes(V10, is_due=True)
    if is_lost:
        del server.held[V0]
    server.set(V10, 2)
    with caplog.at_level(logging.WARNING):
        assert collected(evaluations) == [(V10, 0.5)]
    assert (evaluations.skipped, server.skipped) == (1, [V0])
    assert ("the server has lost it" if is_lost else "1 of 2 samples were done") in caplog.text
    assert "Skipped so far: 1." in caplog.text
    assert server.held == {}


def test_a_version_that_is_published_again_is_asked_for_again_and_told_once(
    server: Server, evaluations: WorkerEvaluations
) -> None:
    for _ in range(2):
        evaluations.publishes(V10, is_due=True)
    assert server.asked == [V10, V10]
    server.set(V10, 2)
    assert collected(evaluations) == [(V10, 0.5)]
    evaluations.publishes(V10, is_due=True)
    assert server.asked == [V10, V10]


def test_at_the_end_a_version_that_no_worker_takes_is_not_waited_for(
    server: Server, evaluations: WorkerEvaluations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_out_evaluation, "POLL_S", 0.0)
    evaluations.publishes(V20, is_due=True)
    server.set(V20, 1, quiet_s=LONG_S)
    assert list(evaluations.wait(lambda: False)) == []
    assert (evaluations.skipped, evaluations.pending) == (1, ())


@pytest.mark.parametrize("is_end", [False, True])
def test_an_evaluation_that_goes_on_and_on_is_given_up(
    server: Server,
    evaluations: WorkerEvaluations,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_end: bool,
) -> None:
    """One worker may renew its lease for ever; its reports keep no evaluation alive."""
    evaluations.publishes(V20, is_due=True)
    server.set(V20, 1)
    assert list(evaluations.collect(is_end=is_end)) == []
    assert evaluations.awaited() == {20}
    monkeypatch.setattr(held_out_evaluation, "MOST_HOLDS", 0)
    assert list(evaluations.collect(is_end=is_end)) == []
    assert (evaluations.skipped, evaluations.pending, server.skipped) == (1, (), [V20])
    assert "step 20 gives no result: 1 of 2 samples were done after 0 times" in caplog.text


def test_a_learner_that_is_to_stop_waits_for_nothing(server: Server, evaluations: WorkerEvaluations) -> None:
    evaluations.publishes(V20, is_due=True)
    assert list(evaluations.wait(lambda: True)) == []


def test_the_observer_asks_before_a_version_is_published_and_writes_what_comes(
    server: Server, evaluations: WorkerEvaluations
) -> None:
    told: list[Event] = []
    sinks: Any = Mock(spec=Sinks)
    sinks.write.side_effect = told.append
    observer = RunObserver(RECIPE, first_step=0, sinks=sinks, experience=server.experience, by_workers=evaluations)
    backend: Any = None  # it evaluates no weights here
    for step in (0, 1, 10, 11):
        observer.on_publish(WeightVersion(1, step))
        observer.on_weights(WeightVersion(1, step), backend, is_last=False)
    assert server.asked == [V0, V10]
    server.set(V0, 2)
    observer.on_weights(V11, backend, is_last=False)
    (event,) = told
    assert isinstance(event, EvaluationEvent)
    assert (event.incarnation, event.step, event.pass_rate, event.known_at_step) == (1, 0, 0.5, 11)
    assert (event.prompts, event.samples, event.pass_at_k, event.response_tokens_mean) == (2, 1, 0.5, 4.0)
    server.set(V10, 2)
    observer.on_publish(V20)
    server.set(V20, 2)
    observer.on_weights(V20, backend, is_last=True)
    assert [event.step for event in told[1:] if isinstance(event, EvaluationEvent)] == [10, 20]


def test_a_broker_that_is_away_while_the_learner_stops_ends_the_wait(
    server: Server, evaluations: WorkerEvaluations
) -> None:
    server.experience.evaluation.side_effect = StopRequested
    observer = RunObserver(RECIPE, first_step=0, sinks=None, experience=server.experience, by_workers=evaluations)
    observer.on_publish(V20)
    backend: Any = None
    observer.on_weights(V20, backend, is_last=True)


def test_a_resumed_learner_asks_for_none_before_the_run(server: Server, evaluations: WorkerEvaluations) -> None:
    observer = RunObserver(RECIPE, first_step=5, sinks=None, experience=server.experience, by_workers=evaluations)
    for step in (5, 6):
        observer.on_publish(WeightVersion(2, step))
    assert server.asked == []
