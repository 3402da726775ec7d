"""When a worker finds itself unfit: the table of figures and verdicts, and the figures that it collects."""

import pytest

from rollout_workers.health.own import EngineHealth
from rollout_workers.health.rules import ERRORS_WITHIN_S, failing, stalled


@pytest.mark.parametrize(
    ("requests", "silent_s", "limit_s", "is_stalled"),
    [(0, 1000.0, 600.0, False), (1, 600.0, 600.0, False), (1, 600.1, 600.0, True), (8, 0.0, 600.0, False)],
)
def test_an_engine_stalls_only_with_requests_and_beyond_the_limit(
    requests: int, silent_s: float, limit_s: float, is_stalled: bool
) -> None:
    assert (stalled(requests, silent_s, limit_s) is not None) == is_stalled


def test_a_stall_names_its_figures() -> None:
    verdict = stalled(2, 700.0, 600.0)
    assert verdict is not None
    assert verdict.reason == "the engine has 2 requests and has sampled nothing for 600 s (workers.stall_s)"


@pytest.mark.parametrize(
    ("failed_s", "is_failing"),
    [((), False), ((0.0, 1.0), False), ((0.0, 1.0, 2.0), True), ((-ERRORS_WITHIN_S - 1, 1.0, 2.0), False)],
)
def test_an_engine_fails_by_its_errors_within_a_time(failed_s: tuple[float, ...], is_failing: bool) -> None:
    assert (failing(failed_s, 2.0, 3, "no") is not None) == is_failing


def test_only_looks_with_requests_and_without_a_token_count() -> None:
    health = EngineHealth(look_s=200.0, stall_s=600.0, errors=3)
    for requests, tokens in [(2, 5), (2, 5), (2, 5), (2, 6), (2, 6), (2, 6), (0, 6), (1, 6), (1, 6), (1, 6)]:
        assert health.look(requests, tokens) is None
    verdict = health.look(1, 6)
    assert verdict is not None
    assert verdict.reason.startswith("the engine has 1 request and has sampled nothing for 600 s")


def test_an_engine_without_a_limit_never_stalls() -> None:
    health = EngineHealth(look_s=1.0, stall_s=0.0, errors=3)
    assert [health.look(1, 0) for _ in range(1000)] == [None] * 1000


def test_errors_that_are_far_apart_do_not_add_up() -> None:
    now = [0.0]
    health = EngineHealth(look_s=1.0, stall_s=600.0, errors=2, clock=lambda: now[0])
    for _ in range(3):
        now[0] += ERRORS_WITHIN_S + 1
        assert health.failed(RuntimeError("out of memory")) is None
    assert health.last_error == "the engine failed: RuntimeError: out of memory"
    now[0] += 1
    verdict = health.failed(RuntimeError(""))
    assert verdict is not None
    assert verdict.reason.endswith("(workers.engine_errors); the last time: RuntimeError: it gave no reason")
