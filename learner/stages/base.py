"""A stage is one stretch of training, from the model that the stage before left to the one that it leaves.

    the recipe's model ──► sft ──► a model ──► your own ──► a model ──► rl ──► checkpoints
                           each in processes of its own, one for every rank

    open ─► run ─► save ─► the directory of a model, which the next stage starts from
     ▲       │
     └───────┘  a stage that was stopped or killed goes on in the same directory, and ends with the same weights

`rl` (`loop.py`) is the learner's loop, whose data come from workers through the broker, so that `deploy` opens it with
a broker besides. The other built-in kinds train from data of their own: `registry.py` names those over records of
files, and `sft.py` also trains on generated examples (`phases`). Your own is a class
`package.module:Name` with an `Options` struct, called as Name(parts, options); `learner.stages.open_stage` finds it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from transformers import PreTrainedTokenizerBase

from headway.broker.errors import HeadwayError
from headway.learner.backends.base import Backend
from headway.learner.batching.clusters import PrefixSharing, Row, Unit, pack_units
from headway.learner.batching.cost import DEFAULT_COST, CostModel
from headway.learner.config import ModelConfig
from headway.learner.data.prompts.rendering import Renderer
from headway.learner.ranks import Ranks

from .stage_checkpoints import StageCheckpoints

Gate = Callable[[Iterable[tuple[str, torch.Tensor]], int], float]
"""(named tensors, number of prompts) -> pass rate on held-out prompts, the same on every rank. Collective: all ranks
iterate the tensors. Generation and scores belong to the workers' room, so `deploy` passes the function in."""


class StageError(HeadwayError):
    """A stage ended without the model that it was to leave."""


class StageMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """The work that a stage has done so far. A stage with more metrics makes a subclass."""

    steps: int
    """Optimizer steps since the stage first began, over all processes that ran it."""
    loss: float | None
    """The loss of the last step; None where this process has trained no step and no checkpoint holds a loss."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """One step of a stage, for a progress bar."""

    part: str
    """The part of the stage, such as `warm-up 1/2`; each part has a bar of its own."""
    step: int
    """The number of the step in its part, from 1."""
    max_steps: int
    """The steps of the part, if nothing ends it before."""
    loss: float
    """The loss of the step."""
    pass_rate: float | None = None
    """The pass rate as it was measured last."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further metrics of the step, and of held-out records as they were measured last (`held_out/...`)."""


@dataclass(frozen=True, kw_only=True)
class StageParts:
    """The arguments with which every rank opens a stage that trains without workers."""

    backend: Backend
    """The model that the stage starts from, with a fresh optimizer; for a `reward_model` stage it is a
    `ScoreBackend`."""
    ranks: Ranks
    """The learner's ranks, for sums and votes over them."""
    tokenizer: PreTrainedTokenizerBase
    """The model's tokenizer."""
    renderer: Renderer
    """Puts text into the model's chat template, where it has one."""
    checkpoints: StageCheckpoints
    """The stage's checkpoints, from which it goes on, and the directory in which it leaves its model."""
    seed: int
    """The run's seed."""
    micro_batch_tokens: int
    """The most tokens of a micro-batch."""
    prefix_sharing: PrefixSharing = "never"
    """Whether tokens that sequences of a micro-batch share at their beginnings are computed once."""
    cost: CostModel = DEFAULT_COST
    """The cost of a micro-batch, by which work is divided and `prefix_sharing: auto` decides."""
    gate: Gate
    """Called with named tensors and a number of prompts: the pass rate on so many held-out prompts. Collective."""
    open_model: Callable[[ModelConfig], Backend]
    """Opens another model on the backend and layout of the recipe, such as a teacher. Collective."""
    report: Callable[[Progress], None]
    """The stage calls it after every step."""
    should_stop: Callable[[], bool]
    """True once the stage is to stop. Ranks may get different answers, so a stage asks `ranks.any`."""

    def pack(self, units: Sequence[Unit]) -> list[Row]:
        """Return this rank's micro-batches of the units, as the recipe wants them packed. All ranks pass the same."""
        return pack_units(
            units,
            replica=self.ranks.replica,
            replicas=self.ranks.replicas,
            micro_batch_tokens=self.micro_batch_tokens,
            cost=self.cost,
            prefix_sharing=self.prefix_sharing,
        )


class Stage(Protocol):
    """One rank of a stage. Every call is collective over the ranks."""

    @property
    def metrics(self) -> StageMetrics:
        """The metrics as of the last step."""
        ...

    def run(self) -> bool:
        """Train to the end; False if the stage was stopped before it. A stage that is at its end trains nothing."""
        ...

    def save(self) -> Path:
        """Return the directory of a model for `from_pretrained`, from which the next stage starts; it is durable.

        Called only after `run` has returned True.
        """
        ...
