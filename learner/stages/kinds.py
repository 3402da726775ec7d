"""The stages without workers that come with Headway and train on records of files, by their kind."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headway.broker.user_code.kinds import typed_options
from headway.learner.config import RecordsConfig, StageConfig
from headway.learner.data.sources import open_conversations, open_labelled, open_pairs

from .supervised.options import (
    DistillationOptions,
    ImitationOptions,
    PreferenceOptions,
    RewardModelOptions,
    TrainingOptions,
    UnpairedOptions,
)


@dataclass(frozen=True, kw_only=True)
class KnownStage:
    """A built-in stage: it is opened as one of the user's own is, and its options are checked before the run starts."""

    path: str
    """Its class, as `package.module:Name`."""
    options: type[TrainingOptions]
    read: Callable[[RecordsConfig, int, str], Sequence[object]]
    """(source, the run's seed, its key in the recipe) -> its records; raises ConfigError."""
    leaves_policy: bool = True
    """Whether other stages may start from its model. A stage that leaves a scorer has no model that generates."""


KNOWN: dict[str, KnownStage] = {
    "sft": KnownStage(
        path="headway.learner.stages.supervised.imitation:ImitationStage",
        options=ImitationOptions,
        read=open_conversations,
    ),
    "dpo": KnownStage(
        path="headway.learner.stages.supervised.preferences:PreferenceStage", options=PreferenceOptions, read=open_pairs
    ),
    "kto": KnownStage(
        path="headway.learner.stages.supervised.unpaired:UnpairedStage", options=UnpairedOptions, read=open_labelled
    ),
    "distill": KnownStage(
        path="headway.learner.stages.supervised.distillation:DistillationStage",
        options=DistillationOptions,
        read=open_conversations,
    ),
    "reward_model": KnownStage(
        path="headway.learner.stages.supervised.reward_model:RewardModelStage",
        options=RewardModelOptions,
        read=open_pairs,
        leaves_policy=False,
    ),
}


def leaves_policy(config: StageConfig) -> bool:
    """Return whether the stage leaves a policy, from which the next stage starts; a stage of the user's own does."""
    return config.kind not in KNOWN or KNOWN[config.kind].leaves_policy


def options_of(config: StageConfig, where: str) -> TrainingOptions | None:
    """Return the typed options of a built-in stage over records, None for other stages: for `sft` with phases, too.
    Raises ConfigError. `where` is the stage's key in the recipe."""
    known = KNOWN.get(config.kind) if config.is_over_records else None
    return typed_options(config.options, known.options, f"{where}.options") if known else None


def check_records(config: StageConfig, seed: int, where: str) -> None:
    """Read the files of a built-in stage over records. Raises ConfigError, with file and row, for what it cannot read.
    Sources on a hub are left to the stage."""
    options = options_of(config, where)
    if options is None:
        return
    for name, source in (("data", options.data), ("held_out", options.held_out)):
        if source is not None and not source.path.startswith(("hf:", "modelscope:")):
            KNOWN[config.kind].read(source, seed, f"{where}.options.{name}")
