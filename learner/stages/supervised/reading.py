"""Records as units of tokens: read, rendered, limited in length, and divided into trained and measured ones."""

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from headway.broker.errors import ConfigError
from headway.learner.batching.packing import PackableSequence, labelled
from headway.learner.batching.units import Unit
from headway.learner.config import RecordsConfig
from headway.learner.data.prompts.base import held_out_places
from headway.learner.data.records import Conversation
from headway.learner.data.records.rendering import ConversationRenderer, LengthLimit
from headway.learner.stages.base import StageParts

from .options import TrainingOptions

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
        _tell(where, len(records), len(units), renderer)
    return units


def _tell(where: str, records: int, kept: int, renderer: ConversationRenderer) -> None:
    """Log how many records were left out, and how many sequences were cut."""
    if kept < records:
        told = renderer.skipped
        log.warning("%s: %d of %d records are left out; of their sequences, %s", where, records - kept, records, told)
    if renderer.cut.total:
        log.warning("%s: cut: %s", where, renderer.cut)
    if renderer.split.total:
        log.warning("%s: prompt and completion are tokenized apart: %s", where, renderer.split)
