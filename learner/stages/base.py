"""What a stage is: one stretch of training, from the model that the stage before left to the one that it leaves.

    the recipe's model ──► sft ──► a model ──► your own ──► a model ──► rl ──► checkpoints
                           each in processes of its own, one for every rank

    open ─► run ─► save ─► the directory of a model, which the next stage starts from
     ▲       │
     └───────┘  stopped or killed: opened again in the same directory it goes on, and ends with the same weights

Two things are built in. `sft` (`sft.py`) trains from data of its own; `rl` (`rl.py`) is the learner's loop, whose data
come from workers through the broker, so that `deploy` opens it with a broker besides. Your own is a class
`package.module:Name` with an `Options` struct, called as Name(parts, options); `learner.stages.open_stage` finds it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from transformers import PreTrainedTokenizerBase

from broker.errors import HeadwayError
from learner.backends.base import Backend
from learner.data.prompts.rendering import Renderer
from learner.ranks import Ranks

from .stage_checkpoints import StageCheckpoints

Gate = Callable[[Iterable[tuple[str, torch.Tensor]], int], float]
"""(named tensors, number of prompts) -> pass rate on held-out prompts, the same on every rank. Collective: all iterate
the tensors. Generating and scoring are the workers' room, so it is passed in."""


class StageError(HeadwayError):
    """A stage ended without the model that it was to leave."""


class StageMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage has done so far. One that has more to say makes a subclass."""

    steps: int
    """Optimizer steps since the stage first began, in whichever process."""
    loss: float | None
    """Of the last step; None where this process has trained none and nothing remembers it."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """One step, for who watches."""

    part: str
    """What it is part of, such as `warm-up 1/2`; each has a bar of its own."""
    step: int
    max_steps: int
    loss: float
    pass_rate: float | None = None
    """As measured last."""


@dataclass(frozen=True, kw_only=True)
class StageParts:
    """What a stage that trains without workers is opened with, on every rank."""

    backend: Backend
    """Holds the model that the stage starts from, with a fresh optimizer."""
    ranks: Ranks
    tokenizer: PreTrainedTokenizerBase
    renderer: Renderer
    checkpoints: StageCheckpoints
    """Where the stage was when it was stopped, and where it leaves its model."""
    seed: int
    micro_batch_tokens: int
    gate: Gate
    report: Callable[[Progress], None]
    """To be called after every step."""
    should_stop: Callable[[], bool]
    """The answer may differ between ranks: ask `ranks.any`."""


class Stage(Protocol):
    """One rank of a stage. Every call is collective over the ranks."""

    @property
    def metrics(self) -> StageMetrics:
        """As of the last step."""
        ...

    def run(self) -> bool:
        """Train to the end; False when asked to stop before it. A stage that is at its end trains nothing."""
        ...

    def save(self) -> Path:
        """The directory of a model for `from_pretrained`, durable when this returns: what the next stage starts from.

        Only after `run` has returned True.
        """
        ...
