"""Calls into an engine's own processes, each with a deadline. Their errors are told apart from Headway's own."""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from headway.broker.errors import HeadwayError, WeightSyncError

T = TypeVar("T")

DEADLINE_S = 300.0
"""Seconds for each call: an engine may hang instead of failing."""


@dataclass(frozen=True)
class EngineCalls:
    """Calls into the engine that has this name."""

    engine: str

    async def answered(self, what: str, call: Awaitable[T]) -> T:
        """Return the call's answer. Raises WeightSyncError if it fails or takes longer than `DEADLINE_S`."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await call
        except TimeoutError as error:
            raise WeightSyncError(
                f"{self.engine} did not {what} within {DEADLINE_S:.0f} s; restart the worker"
            ) from error
        except HeadwayError:
            raise
        except Exception as error:  # engines raise no narrower one for a call that fails in their processes
            raise WeightSyncError(f"{self.engine} failed to {what}: {error}") from error
