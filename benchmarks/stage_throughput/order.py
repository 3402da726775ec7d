"""The case that a process measures, and the figures that it returns."""

import itertools
import statistics
import time
from typing import Any, Literal

import msgspec
import torch

Task = Literal["sft", "dpo"]


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a figure depends on."""

    name: str
    task: Task
    model: str
    """The model's Hugging Face directory."""
    data: str
    """A file of JSON lines."""
    records_per_step: int
    longest_tokens: int
    mean_tokens: float
    """Tokens of a record; of a pair, those of both of its sequences."""
    micro_batch_tokens: int
    steps: int
    warm_up_steps: int
    device: str


class Watch:
    """Notes when each step ended, and the number of tokens that it trained."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._began_s = time.perf_counter()
        self._ended_s: list[float] = []
        self._tokens: list[int] = []
        self._in_step = 0

    def begin(self) -> None:
        """Note that training begins; the time before the first step does not count."""
        self._began_s = time.perf_counter()

    def add(self, tokens: int) -> None:
        """Count tokens of the running step."""
        self._in_step += tokens

    def step(self) -> None:
        """Note the end of a step."""
        if self._device == "cuda":
            torch.cuda.synchronize()
        self._ended_s.append(time.perf_counter())
        self._tokens.append(self._in_step)
        self._in_step = 0

    def figures(self, warm_up_steps: int) -> dict[str, Any]:
        """Return the speed over all measured steps."""
        ends_s, tokens = self._ended_s[warm_up_steps - 1 :], self._tokens[warm_up_steps:]
        steps_s = [after - before for before, after in itertools.pairwise(ends_s)]
        peak = torch.cuda.max_memory_allocated() if self._device == "cuda" else 0
        return {
            "tokens_per_s": round(sum(tokens) / sum(steps_s), 1),
            "step_s": round(statistics.median(steps_s), 4),
            "tokens_per_step": round(statistics.mean(tokens)),
            "until_first_step_s": round(self._ended_s[0] - self._began_s, 2),
            "peak_memory_gib": round(peak / 2**30, 2),
        }
