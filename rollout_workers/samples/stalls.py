"""Notices an engine that hangs: one that has requests and samples nothing. Its worker lives, and would renew the leases
of what it holds for as long as it does, with the learner waiting for these samples.
"""

import math

from broker.errors import HeadwayError

PATIENCE_S = 600.0
"""Many times what an engine that works takes from one token to the next, prompts and compiling included."""


class StallWatch:
    """Counts looks, not time: a worker that was stopped has not looked."""

    def __init__(self, look_s: float) -> None:
        """`look_s`: about the time between two looks."""
        self._most = math.ceil(PATIENCE_S / look_s)
        self._looks = 0
        self._tokens = 0

    def look(self, requests: int, tokens: int) -> None:
        """`requests`: those that the engine has and may sample for; `tokens`: all that it has sampled until now. Raises
        HeadwayError."""
        if not requests or tokens != self._tokens:
            self._looks, self._tokens = 0, tokens
            return
        self._looks += 1
        if self._looks > self._most:
            raise HeadwayError(
                f"the engine has {requests} requests and has sampled nothing for {PATIENCE_S:g} s; restart the worker"
            )
