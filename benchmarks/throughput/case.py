"""One case: what is measured."""

from typing import Any, Protocol

import msgspec

from learner.config import ComputeConfig, LayoutConfig

from .workload import long_tailed_lengths

LEARNING_RATE = 1e-6


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a figure depends on."""

    name: str
    """fsdp, megatron, or a baseline of `BASELINES`."""
    shape: str
    layers: int = 0
    """0: as many as the shape has."""
    processes: int = 1
    layout: LayoutConfig = LayoutConfig()
    compute: ComputeConfig = ComputeConfig()
    micro_batch_tokens: int = 16384
    sequences: int = 64
    median_tokens: int = 1024
    longest_tokens: int = 16384
    lengths: tuple[int, ...] = ()
    """In the place of drawn ones."""
    steps: int = 5
    warm_up_steps: int = 2
    device: str = "cuda"
    profile: bool = False

    def drawn_lengths(self) -> list[int]:
        """Of the sequences of every step."""
        return list(self.lengths) or long_tailed_lengths(self.sequences, self.median_tokens, self.longest_tokens)


class TrainingStep(Protocol):
    """A model in training, with all that a step needs."""

    rank: int
    facts: dict[str, Any]
    """What to say of it beside its figures."""

    def step(self) -> tuple[float, float]:
        """One update over the same sequences: (loss, gradient norm). Collective."""
        ...
