"""The loop of every stage that trains on records.

for each step:  the order's batch ─► units ─► rows of whole units ─► one update of the task's loss
now and then:   the same loss and metrics on held-out units, and a checkpoint, of which the best one may be kept

Records become units of tokens: read, rendered, limited in length, and divided into trained and measured ones. The
number of a step alone gives its records, so a resumed stage needs to know nothing else.
"""

import logging
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import torch

from headway.algorithms.metrics import Metrics, read, summarize
from headway.broker.errors import ConfigError
from headway.broker.user_code.kinds import unknown_kind
from headway.learner.backends.base import TokenLoss
from headway.learner.batching.batch import PackedBatch
from headway.learner.batching.clusters import Row, Unit
from headway.learner.batching.packing import PackableSequence, concatenate, labelled
from headway.learner.config import RecordsConfig, learning_rate
from headway.learner.data.prompts.base import held_out_places
from headway.learner.data.records import Conversation
from headway.learner.data.records.conversation_renderer import ConversationRenderer, LengthLimit
from headway.learner.data.records.loading import digest_of
from headway.learner.objective.loss import Objective
from headway.learner.stages.base import Progress, StageMetrics, StageParts
from headway.learner.stages.registry import HELD_OUT, BestOptions, TrainingOptions
from headway.learner.stages.response_values import digest_of_units


class RecordOrder:
    """The order in which a stage trains its records: every epoch holds each of them once, in an order of its own."""

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        batch_size: int,
        epochs: float,
        max_steps: int,
        seed: int,
        batch_tokens: int = 0,
    ) -> None:
        """`lengths`: of each record, its tokens. `batch_tokens`: the most tokens of a step, which then has not
        `batch_size` records but as many as fit, at least one. `max_steps`: the stage ends there even if epochs are
        left; 0: it does not. At least one step is trained."""
        self._lengths = lengths
        self._seed = seed
        self._epoch = lru_cache(maxsize=2)(self._shuffled)
        self._total = max(1, math.ceil(epochs * len(lengths)))
        self._starts: Sequence[int] = range(0, self._total, batch_size)
        if batch_tokens:
            self._starts = list(self._within(batch_tokens))
        self.steps = min(len(self._starts), max_steps) if max_steps else len(self._starts)
        """The number of steps of the stage."""

    def batch(self, step: int) -> list[int]:
        """Returns the indices of the records of a step, from 0. The last step of all may have fewer."""
        end = self._starts[step + 1] if step + 1 < len(self._starts) else self._total
        return [self._at(position) for position in range(self._starts[step], end)]

    def _within(self, batch_tokens: int) -> Iterator[int]:
        """Yields the position at which each step of at most so many tokens begins."""
        tokens = batch_tokens
        for position in range(self._total):
            length = self._lengths[self._at(position)]
            tokens += length
            if tokens > batch_tokens:
                yield position
                tokens = length

    def _at(self, position: int) -> int:
        epoch, place = divmod(position, len(self._lengths))
        return self._epoch(epoch)[place]

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self._lengths)))
        random.Random(f"epoch:{self._seed}:{epoch}").shuffle(order)
        return order


R = TypeVar("R")
Read = Callable[[RecordsConfig, int, str], Sequence[R]]
"""(source, the run's seed, its key in the recipe) -> its records; raises ConfigError."""

Units = list[tuple[R, Unit]]
"""Records, each with its sequences."""

log = logging.getLogger(__name__)


def read_units(
    parts: StageParts,
    options: TrainingOptions,
    read: Read[R],
    sequences_of: Callable[[R], Sequence[Conversation]],
    where: str,
    *,
    trained: slice = slice(None),
) -> tuple[Units[R], Units[R]]:
    """Returns the records that are trained and those that are measured, each with its unit.

    `sequences_of` gives the sequences of a record, which stay together; a record of which one is left out for its
    length is left out whole, and counted in the log. So is one whose `trained` sequences are those of a measured one,
    such as a row that the file has twice. `where` is the key of the options in the recipe. Raises ConfigError for
    records that cannot be read or rendered, and where none is left to train.
    """
    units = _rendered(parts, options, read(options.data, parts.seed, f"{where}.data"), sequences_of, f"{where}.data")
    if options.held_out is not None:
        key = f"{where}.held_out"
        held_out = _rendered(parts, options, read(options.held_out, parts.seed, key), sequences_of, key)
    else:
        places = set(held_out_places(len(units), options.held_out_records, options.held_out_seed))
        held_out = [unit for place, unit in enumerate(units) if place in places]
        units = [unit for place, unit in enumerate(units) if place not in places]
    kept_out = {_tokens_of(unit[trained]) for _, unit in held_out}
    others = [(record, unit) for record, unit in units if _tokens_of(unit[trained]) not in kept_out]
    repeated = len(units) - len(others)
    if repeated and parts.ranks.is_first:
        log.warning("%s.data: %d of %d records equal a held-out one and are left out", where, repeated, len(units))
    if not others:
        raise ConfigError(
            f"{where}.data: no record is left to train: {len(held_out)} are held out, and {repeated} equal one of them."
            " Give more records, or hold out fewer."
        )
    return others, held_out


def _tokens_of(sequences: Sequence[PackableSequence]) -> tuple[bytes, ...]:
    return tuple(each.tobytes() for one in sequences for each in (one.token_ids, one.loss_mask))


def _rendered(
    parts: StageParts,
    options: TrainingOptions,
    records: Sequence[R],
    sequences_of: Callable[[R], Sequence[Conversation]],
    where: str,
) -> Units[R]:
    limit = LengthLimit(max_tokens=options.max_tokens, too_long=options.too_long)
    renderer = ConversationRenderer(parts.tokenizer, parts.renderer, limit)
    units: Units[R] = []
    for record in records:
        rendered = renderer.render_together(sequences_of(record))
        unit = [labelled(one.token_ids, one.loss_mask) for one in rendered if one is not None]
        if len(unit) == len(rendered):
            units.append((record, unit))
    if parts.ranks.is_first:
        _log_left_out(where, len(records), len(units), renderer)
    return units


def _log_left_out(where: str, records: int, kept: int, renderer: ConversationRenderer) -> None:
    """Log how many records were left out, and how many sequences were cut."""
    if kept < records:
        skipped = renderer.skipped
        log.warning(
            "%s: %d of %d records are left out; of their sequences, %s", where, records - kept, records, skipped
        )
    if renderer.cut.total:
        log.warning("%s: cut: %s", where, renderer.cut)
    if renderer.split.total:
        log.warning("%s: prompt and completion are tokenized apart: %s", where, renderer.split)


_CHANGED_FILES = "their files have another content"
_CHANGED_TOKENS = "the model's tokenizer or chat template makes other tokens of them, or their data set is another"

EMPTY = Row(batch=concatenate([]), units=())


class Task(Protocol):
    """The model, data and loss that a kind of stage trains."""

    units: Sequence[Unit]
    """The records that are trained, as sequences that stay together."""
    held_out: Sequence[Unit]
    """Records of the same kind that are measured."""

    def prepare(self, is_new: bool) -> None:
        """Compute what the losses need before the first of them; `is_new`: no step was trained yet. Collective."""
        ...

    def loss(self, rows: Sequence[Row], chosen: Sequence[int], *, held_out: bool) -> TokenLoss:
        """Return the loss over the rows of all ranks. `chosen`: of each unit that was packed, its index among `units`
        or `held_out`."""
        ...


class TaskProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The stage's progress, which its checkpoints hold."""

    steps: int = 0
    """The number of trained steps."""
    loss: float | None = None
    metrics: dict[str, float] = {}
    """The metrics of the last step, and of the held-out records as they were measured last."""
    data: str = ""
    """The digests of the files of records, and of their tokens, with which the stage began."""


class TaskStage:
    """One task, trained from a model to a model."""

    def __init__(self, parts: StageParts, options: TrainingOptions, task: Task, *, part: str) -> None:
        """`part` names the stage in progress bars."""
        self._parts = parts
        self._options = options
        self._task = task
        self._part = part
        self._order = RecordOrder(
            [sum(len(sequence.token_ids) for sequence in unit) for unit in task.units],
            batch_size=options.batch_size,
            batch_tokens=options.batch_tokens,
            epochs=options.epochs,
            max_steps=options.max_steps,
            seed=parts.seed,
        )
        best = options.best or BestOptions()
        parts.checkpoints.prefer((best.metric, best.mode) if options.keep == "best" else None, options.keep_last)
        self._progress = self._begun()

    @classmethod
    def measured(cls, options: Any, where: str) -> set[str]:
        """Return the names of the metrics that the task reports of trained and held-out records. A kind adds its own.
        Raises ConfigError for options of a loss that it does not have; `where` is their key in the recipe."""
        return {"loss"}

    @classmethod
    def check(cls, options: Any, where: str) -> None:
        """Raise ConfigError for options that are wrong together, before any stage runs."""
        known = {f"{HELD_OUT}{name}" for name in cls.measured(options, where)}
        if options.best is not None and options.best.metric not in known:
            raise unknown_kind(options.best.metric, sorted(known), f"{where}.best.metric")
        if options.best is not None and options.keep != "best":
            raise ConfigError(f"{where}.best says which model is the best one, which only `keep: best` leaves.")
        if options.keep == "best" and not (options.held_out or options.held_out_records):
            raise ConfigError(
                f"{where}.keep is best, which held-out records decide, and there are none. Give held_out, or"
                " held_out_records."
            )

    @property
    def metrics(self) -> StageMetrics:
        """The metrics as of the last step."""
        return StageMetrics(steps=self._progress.steps, loss=self._progress.loss)

    def run(self) -> bool:
        """Train all steps that are left; False if stopped before the end."""
        parts = self._parts
        if self._progress.steps < self._order.steps:
            self._task.prepare(is_new=self._progress.steps == 0)
        while self._progress.steps < self._order.steps:
            self._train()
            if self._progress.steps == self._order.steps:
                break
            if parts.ranks.any(parts.should_stop()):
                parts.checkpoints.keep(self._progress.steps, self._place)
                return False
            parts.checkpoints.keep_if_due(self._progress.steps, self._place)
        return True

    def save(self) -> Path:
        """Write the model of the last step, or the best one, and return its directory."""
        if self._options.keep == "best":
            self._parts.checkpoints.load_best()
        return self._parts.checkpoints.leave(self._progress.steps, self._place)

    def _begun(self) -> TaskProgress:
        """Return the progress to go on from. Raises ConfigError if the records, or their tokens, have changed since."""
        parts, sources = self._parts, (self._options.data, self._options.held_out)
        files = parts.ranks.share_bytes(digest_of(*sources) if parts.ranks.is_first else b"").hex()
        digest = f"{files}-{digest_of_units([*self._task.units, *self._task.held_out])}"
        progress = msgspec.convert(parts.checkpoints.load(), TaskProgress)
        if progress.steps and progress.data not in ("", digest):
            cause = _CHANGED_FILES if progress.data.partition("-")[0] != files else _CHANGED_TOKENS
            raise ConfigError(
                f"The records of stage {self._part} have changed since it began, {progress.steps} steps ago: {cause}."
                " What is left to train would be others. Bring them back, or let the stage start over: remove"
                f" {parts.checkpoints.running_directory}."
            )
        return msgspec.structs.replace(progress, data=digest)

    @property
    def _place(self) -> dict[str, object]:
        place: dict[str, object] = msgspec.to_builtins(self._progress)
        return place

    def _train(self) -> None:
        """Train one step, measure where it is due, and report both."""
        step, options = self._progress.steps, self._options
        rate = learning_rate(
            step,
            self._order.steps,
            peak=options.learning_rate,
            warmup_steps=options.warmup_steps,
            schedule=options.schedule,
        )
        loss, metrics = self._update(self._order.batch(step), rate)
        done = step + 1
        is_measured = self._is_due(done)
        held_out = self._measure() if is_measured else _held_out_of(self._progress.metrics)
        metrics = {**metrics, **held_out, "learning_rate": rate}
        self._progress = msgspec.structs.replace(self._progress, steps=done, loss=loss, metrics=metrics)
        self._parts.report(
            Progress(part=self._part, step=done, max_steps=self._order.steps, loss=loss, metrics=self._progress.metrics)
        )
        if is_measured and options.keep == "best":
            self._parts.checkpoints.keep_measured(done, self._place, held_out)

    def _is_due(self, done: int) -> bool:
        every = self._options.evaluate_every_steps
        return bool(self._task.held_out) and (done == self._order.steps or (every > 0 and done % every == 0))

    def _update(self, chosen: Sequence[int], rate: float) -> tuple[float, dict[str, float]]:
        rows = self._packed([self._task.units[index] for index in chosen])
        token_loss = self._task.loss([*rows, EMPTY], chosen, held_out=False)
        loss, norm, reports = self._step([row.batch for row in rows], token_loss, rate)
        return loss, {**self._combined(reports, token_loss, len(rows)), "grad_norm": norm}

    @torch.no_grad()
    def _measure(self) -> dict[str, float]:
        """Return loss and metrics of the held-out units under the present weights."""
        rows = self._packed(self._task.held_out)
        token_loss = self._task.loss([*rows, EMPTY], range(len(self._task.held_out)), held_out=True)
        outputs = self._outputs([row.batch for row in rows])
        shares = [token_loss(index, outputs_T) for index, outputs_T in enumerate(outputs)]
        (total,) = self._parts.ranks.sum([sum(float(share) for share, _ in shares)])
        measured = {"loss": total, **self._combined([report for _, report in shares], token_loss, len(rows))}
        return {f"{HELD_OUT}{name}": value for name, value in measured.items()}

    def _outputs(self, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
        """Return what the loss takes of each row: logprobs [T], unless the stage's model is no policy."""
        return self._parts.backend.logprobs(batches, 1.0)

    def _step(
        self, batches: Sequence[PackedBatch], loss: TokenLoss, learning_rate: float
    ) -> tuple[float, float, list[dict[str, float]]]:
        """Make one update; return what the backend's `step` does."""
        return self._parts.backend.step(batches, loss, temperature=1.0, learning_rate=learning_rate)

    def _packed(self, units: Sequence[Unit]) -> list[Row]:
        return self._parts.pack(units)

    def _combined(self, reports: Sequence[dict[str, float]], token_loss: TokenLoss, empty: int) -> dict[str, float]:
        """Return the metrics over all ranks. The report of the row `empty` has all names, so that ranks without units
        have them, too."""
        _, nothing = token_loss(empty, torch.zeros(0))
        return Objective.combine_reports([*reports, nothing], self._parts.ranks.sum, self._parts.ranks.max)


def _held_out_of(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith(HELD_OUT)}


def names_of(metrics: Metrics) -> set[str]:
    """Return the names under which a loss's metrics are reported, and that of the loss."""
    return {"loss", *summarize(read(metrics))}
