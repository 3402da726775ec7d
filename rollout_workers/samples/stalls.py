"""Notices an engine that hangs: it has requests and samples nothing. Its worker is alive, so without this it would
renew the leases of those samples for ever while the learner waits for them."""

import math

from broker.errors import HeadwayError

PATIENCE_S = 600.0
"""Seconds without a token after which an engine counts as hanging: many times what a working engine takes from one
token to the next, prompts and compiling included."""


class StallWatch:
    """Counts looks instead of time: a worker process that was stopped has not looked meanwhile."""

    def __init__(self, look_s: float) -> None:
        """`look_s`: about the seconds between two looks."""
        self._most = math.ceil(PATIENCE_S / look_s)
        self._looks = 0
        self._tokens = 0

    def look(self, requests: int, tokens: int) -> None:
        """Compare with the last look. `requests`: those for which the engine may sample; `tokens`: all that it has
        sampled until now. Raises HeadwayError if the engine hangs."""
        if not requests or tokens != self._tokens:
            self._looks, self._tokens = 0, tokens
            return
        self._looks += 1
        if self._looks > self._most:
            raise HeadwayError(
                f"the engine has {requests} requests and has sampled nothing for {PATIENCE_S:g} s; restart the worker"
            )
