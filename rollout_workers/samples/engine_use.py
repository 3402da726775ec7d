"""A worker's use of its engine: requests are counted, tokens are measured, and failures are judged."""

import logging
from collections.abc import Callable

from headway.broker.errors import BrokerError, FrameError
from headway.rollout_workers.engines.base import Engine, GenerationRequest
from headway.rollout_workers.health.own import EngineHealth
from headway.rollout_workers.health.rules import Verdict

from .generation import EngineFailedError, generate
from .recorder import Recorder
from .throughput import Throughput

log = logging.getLogger(__name__)


class EngineUse:
    """Generates turns with one engine, of training and of evaluation alike."""

    def __init__(
        self,
        engine: Engine,
        health: EngineHealth,
        may_sample: Callable[[], bool],
        on_verdict: Callable[[Verdict | None], None],
    ) -> None:
        """`may_sample`: whether the engine may sample now, or swaps or sleeps. `on_verdict` gets what the rules say
        after every failure and every look."""
        self._engine = engine
        self._health = health
        self._may_sample = may_sample
        self._on_verdict = on_verdict
        self._requests = 0
        self.generated = Throughput()

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    @property
    def sampling_now(self) -> int:
        """Requests that the engine has and may sample for."""
        return self._requests if self._may_sample() else 0

    @property
    def silent_s(self) -> float:
        """Seconds since the last token, while the engine has requests and may sample."""
        return self.generated.silent_s() if self.sampling_now else 0.0

    @property
    def last_error(self) -> str:
        return self._health.last_error

    async def generate(
        self, request: GenerationRequest, recorder: Recorder, on_tokens: Callable[[], None] | None = None
    ) -> None:
        """Generate one turn. Raises EngineFailedError, and the errors of the segments that `on_tokens` leads to."""

        def note(count: int) -> None:
            self.generated.add(count)
            if on_tokens is not None:
                on_tokens()

        if not self._requests:
            self.generated.expect()
        self._count(1)
        try:
            await generate(self._engine, request, recorder, note)
        except (BrokerError, FrameError):  # of the segments
            raise
        except Exception as error:
            log.exception("the engine failed at %s", request.request_id)
            self._on_verdict(self._health.failed(error))
            raise EngineFailedError(self._health.last_error) from error
        finally:
            self._count(-1)

    def look(self) -> None:
        """Compare with the last look, to see an engine that hangs. The worker calls it with every heartbeat."""
        self.generated.run(self.sampling_now)
        self._on_verdict(self._health.look(self.sampling_now, self.generated.total))

    def _count(self, change: int) -> None:
        self._requests += change
        self.generated.run(self.sampling_now)
