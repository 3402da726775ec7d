"""A worker finds itself unfit by a table of figures and verdicts, from figures that it collects."""

import pytest

from headway.rollout_workers.health import (
    ERRORS_WITHIN_S,
    EngineHealth,
    GenerationRate,
    failing,
    silent,
    slowest,
    stalled,
)


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
    for requests, tokens in [(2, 5), (2, 5), (2, 5), (2, 6), (2, 6), (2, 6), (0, 6), *[(1, 6)] * 4]:
        assert health.check(requests, tokens) is None
    verdict = health.check(1, 6)
    assert verdict is not None
    assert verdict.reason.startswith("the engine has 1 request and has sampled nothing for 600 s")


def test_requests_that_came_since_the_last_look_have_not_waited_for_it() -> None:
    health = EngineHealth(look_s=3600.0, stall_s=600.0, errors=3)
    assert [health.check(requests, 0) for requests in (4, 0, 4)] == [None] * 3


def test_an_engine_without_a_limit_never_stalls() -> None:
    health = EngineHealth(look_s=1.0, stall_s=0.0, errors=3)
    assert [health.check(1, 0) for _ in range(1000)] == [None] * 1000


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


EVEN = GenerationRate(tokens=6000, busy_s=60.0, slot_s=240.0)
"""A pace of 100 tokens/s, 25 for each of 4 requests."""


@pytest.mark.parametrize(
    ("others", "pace", "is_slow"),
    [
        (3, GenerationRate(1000, 60.0, 240.0), True),
        (2, GenerationRate(1000, 60.0, 240.0), True),
        (1, GenerationRate(1000, 60.0, 240.0), False),  # two workers have no majority
        (3, GenerationRate(3000, 60.0, 240.0), False),  # half the pace
        (3, GenerationRate(1000, 20.0, 80.0), False),  # hardly busy: it starts, swaps or has no work
        (3, GenerationRate(1000, 60.0, 40.0), False),  # few requests: 17 tokens/s in all, and 25 for each
        (3, GenerationRate(6000, 60.0, 2400.0), False),  # many requests: 2.5 tokens/s for each, and 100 in all
        (3, GenerationRate(0, 60.0, 240.0), True),
    ],
)
def test_a_worker_is_slow_by_both_of_its_paces(others: int, pace: GenerationRate, is_slow: bool) -> None:
    paces = {f"w{number}": EVEN for number in range(others)} | {"slow": pace}
    found = slowest(paces, 60.0, 0.25)
    assert (found is not None) == is_slow
    if found is not None:
        assert (found[0], found[1].rule) == ("slow", "slow")


def test_others_that_only_wait_for_the_slow_worker_are_compared_by_the_little_that_they_do() -> None:
    waits = GenerationRate(tokens=400, busy_s=4.0, slot_s=16.0)
    assert slowest({"a": waits, "b": waits, "c": GenerationRate(600, 60.0, 240.0)}, 60.0, 0.25) is not None
    idle = GenerationRate(tokens=200, busy_s=2.0, slot_s=8.0)
    assert slowest({"a": idle, "b": idle, "c": GenerationRate(600, 60.0, 240.0)}, 60.0, 0.25) is None


def test_the_verdict_on_a_slow_worker_names_its_figures() -> None:
    found = slowest({"a": EVEN, "b": EVEN, "c": GenerationRate(600, 60.0, 240.0)}, 60.0, 0.25)
    assert found is not None
    for part in ("2.5 tokens/s", "10% of the median 25 of the 3", "10 tokens/s", "100", "25%", "60 s"):
        assert part in found[1].reason
    assert "(workers.slow_factor, workers.slow_window_s)" in found[1].reason


def test_a_pool_in_which_nobody_makes_a_token_has_no_slow_worker() -> None:
    assert slowest({name: GenerationRate(0, 60.0, 240.0) for name in "abc"}, 60.0, 0.25) is None
    assert slowest({}, 60.0, 0.25) is None


@pytest.mark.parametrize(("unheard_s", "limit_s", "is_silent"), [(600, 600, False), (601, 600, True), (601, 0, False)])
def test_a_worker_is_silent_beyond_the_limit(unheard_s: float, limit_s: float, is_silent: bool) -> None:
    assert (silent(unheard_s, limit_s) is not None) == is_silent
