"""A learner runs one stage from its beginning to its end: reinforcement learning, supervised training, or a replay.

    base.py    what a stage is: open, run, save, and what the next one starts from
    loop.py    the learner's loop, `rl`: take -> pack -> step -> publish -> commit
    registry.py            the stages over records of files and their options, by the name that a recipe gives
    record_stage.py        their loop: batch -> pack -> update -> measure -> checkpoint; each kind brings a task
      ├─ sft.py            conversations: supervised fine-tuning; and on generated examples, phase by phase
      ├─ dpo.py, kto.py    preferences: pairs (DPO and its kin), single judgements (KTO)
      ├─ reward_model.py   pairs, for a model of scores
      ├─ distill.py        conversations with a teacher: forward or reverse KL, or JSD, to what it finds likely
      └─ response_values.py   reference logprobs and a teacher's likeliest tokens, computed once and kept
    starting_point.py      where a learner begins: checkpoint, identity, log, claim
    stage_checkpoints.py   one checkpoint at a time, written while training goes on; the model that a stage leaves
    device_lock.py         learner and engines on the same devices in turns

The invariant: a stage that was stopped or killed, and is opened again, ends with the weights that it would have had;
neither packing nor the number of ranks changes the loss of one over records.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from headway.broker.errors import ConfigError
from headway.broker.user_code.import_paths import load_custom
from headway.broker.user_code.kinds import typed_options, unknown_kind
from headway.learner.config import STAGES, StageConfig

from .registry import RECORD_STAGES

if TYPE_CHECKING:
    from .base import Stage, StageParts


def open_stage(config: StageConfig, parts: "StageParts", where: str) -> "Stage":
    """Returns a stage that trains without workers, at the point where it was stopped. Collective.

    `where` is its key in the recipe. Raises ConfigError for an unknown kind or option.
    """
    assert not config.has_workers, "the learner's role opens it, with a broker besides"
    match config.kind:
        case "sft" if not config.is_over_records:
            from .sft import SftPhasesStage

            return SftPhasesStage(parts, config.phases)
        case known if known in RECORD_STAGES:
            return _open_custom(StageConfig(kind=RECORD_STAGES[known].path, options=config.options), parts, where)
        case own if ":" in own:
            return _open_custom(config, parts, where)
        case unknown:
            raise unknown_kind(unknown, STAGES, f"{where}.kind")


def check_stages(plan: Sequence[StageConfig]) -> None:
    """Raise ConfigError for the first wrong option of a stage without workers, before any of them runs. A stage of the
    user's own declares its options; its module is imported."""
    from headway.broker.user_code.import_paths import load

    for number, config in enumerate(plan):
        where, known = f"stages[{number}]", RECORD_STAGES.get(config.kind)
        if known is not None and config.is_over_records:
            stage = load(known.path, f"{where}.kind")
            stage.check(typed_options(config.options, known.options, f"{where}.options"), f"{where}.options")
        elif ":" in config.kind:
            _options_of(load(config.kind, f"{where}.kind"), config, where)


def _open_custom(config: StageConfig, parts: "StageParts", where: str) -> "Stage":
    """Returns a stage by its class. The user's own module is trusted, since the recipe was given to this very
    process."""
    from .base import Stage

    def opened(own: Any) -> Stage:
        stage: Stage = own(parts, _options_of(own, config, where))
        return stage

    stage: Stage = load_custom(config.kind, Stage, f"{where}.kind", opened)
    return stage


def _options_of(own: Any, config: StageConfig, where: str) -> msgspec.Struct:
    options = getattr(own, "Options", None)
    if not (isinstance(options, type) and issubclass(options, msgspec.Struct)):
        raise ConfigError(
            f"{where}.kind: {config.kind!r} has no Options. A stage declares them as a msgspec.Struct of that name in"
            " its class, without fields if it has none."
        )
    return typed_options(config.options, options, f"{where}.options")
