"""One case of the measurement."""

from typing import Any, Protocol

import msgspec

from headway.learner.config import ComputeConfig, LayoutConfig

from .workload import long_tailed_lengths

LEARNING_RATE = 1e-6


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a figure depends on."""

    name: str
    """fsdp, megatron, or a baseline of `BASELINES`."""
    shape: str
    layers: int = 0
    """The number of layers; 0 takes as many as the shape has."""
    processes: int = 1
    layout: LayoutConfig = LayoutConfig()
    compute: ComputeConfig = ComputeConfig()
    micro_batch_tokens: int = 16384
    sequences: int = 64
    median_tokens: int = 1024
    longest_tokens: int = 16384
    lengths: tuple[int, ...] = ()
    """Lengths in the place of drawn ones."""
    steps: int = 5
    warm_up_steps: int = 2
    device: str = "cuda"
    profile: bool = False

    def drawn_lengths(self) -> list[int]:
        """Return the lengths of the sequences of every step."""
        return list(self.lengths) or long_tailed_lengths(self.sequences, self.median_tokens, self.longest_tokens)


class TrainingStep(Protocol):
    """A model in training, with all that a step needs."""

    rank: int
    facts: dict[str, Any]
    """Facts that the output has beside the figures."""

    def step(self) -> tuple[float, float]:
        """Take one update over the same sequences, and return (loss, gradient norm). Collective."""
        ...
