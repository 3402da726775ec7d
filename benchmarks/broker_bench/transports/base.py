"""The task of a transport: hand trajectories over in one process, and get them back as arrays in another."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.broker_bench.payloads import Payloads, number_of, payloads_of
from headway.broker.schema import Trajectory

PRODUCERS = 64
"""Coroutines that each hand over one trajectory at a time."""
BATCH = 64
"""Trajectories that a consumer asks for at once, where it can."""


@dataclass(frozen=True)
class Task:
    """One lap: `count` trajectories with frames of `frame_bytes`, through the server or address `url`."""

    url: str
    count: int
    frame_bytes: int
    lap: int
    """The lap's number among those of the same two processes."""

    @property
    def payloads(self) -> Payloads:
        return payloads_of(self.frame_bytes)


@dataclass
class Receipt:
    """The numbers of the trajectories that arrived."""

    numbers: list[int] = field(default_factory=list)
    tokens: int = 0

    def note(self, trajectory: Trajectory) -> None:
        self.note_arrays(number_of(trajectory.tid), trajectory.response_tokens, trajectory.behavior_logprobs)

    def note_arrays(self, number: int, tokens: NDArray[np.int32], logprobs: NDArray[np.float32]) -> None:
        assert tokens.dtype == np.int32
        assert logprobs.dtype == np.float32
        self.numbers.append(number)
        self.tokens += len(tokens)

    def check(self, task: Task) -> None:
        """Raises AssertionError unless each arrived exactly once."""
        assert sorted(self.numbers) == list(range(task.count)), f"{len(self.numbers)} of {task.count} trajectories"
        variants = [len(variant.response_tokens) for variant in task.payloads.variants]
        assert self.tokens == sum(variants[number % len(variants)] for number in range(task.count))


Produce = Callable[[], Awaitable[None]]
Consume = Callable[[], Awaitable[Receipt]]


class Transport(Protocol):
    """One way of moving trajectories. The consumer's end is opened first; an opened end is ready to go."""

    promise: str
    """The guarantee for a trajectory that counts as handed over, and as received."""

    def consumer(self, task: Task) -> AbstractAsyncContextManager[Consume]:
        """Receive until all of the task's trajectories are there."""

    def producer(self, task: Task) -> AbstractAsyncContextManager[Produce]:
        """Hand all of the task's trajectories over."""


async def in_coroutines(numbers: Iterable[int], send: Callable[[int], Awaitable[None]]) -> None:
    """Send all of them, each coroutine its next one when its last was handed over."""
    waiting = iter(numbers)

    async def one_after_the_other() -> None:
        for number in waiting:
            await send(number)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(PRODUCERS):
            tasks.create_task(one_after_the_other())
