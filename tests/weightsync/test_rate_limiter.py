"""A limit on bytes a second, counted on a clock of the test's own."""

import math
import time

import pytest

from headway.weightsync.limits import Deadline, RateLimiter


class Clock(Deadline):
    """A clock on which time passes only in pauses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(math.inf)
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def pause(self, seconds: float) -> None:
        self.now += max(0.0, seconds)


def move(kept: RateLimiter, total: int, clock: Clock) -> float:
    """Return the seconds that so many bytes take over a line that is infinitely fast."""
    began, left = clock.now, total
    while left:
        piece = min(left, kept.chunk_bytes(1 << 20))
        kept.wait(piece, clock)
        left -= piece
    return clock.now - began


def test_the_rate_is_kept_from_the_first_byte_on(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    kept = RateLimiter(100_000)
    assert move(kept, 1_000_000, clock) == pytest.approx(10, abs=0.3)
    assert move(kept, 1_000_000, clock) == pytest.approx(10, abs=0.3)


def test_idle_time_is_not_saved_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    kept = RateLimiter(100_000)
    clock.now += 3600
    assert move(kept, 1_000_000, clock) == pytest.approx(10, abs=0.3)


def test_no_piece_takes_longer_than_a_server_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RateLimiter(100_000).chunk_bytes(1 << 20) == 25_000
    assert RateLimiter(1 << 30).chunk_bytes(1 << 20) == 1 << 20


def test_without_a_limit_there_are_no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    assert move(RateLimiter(None), 1 << 40, clock) == 0
