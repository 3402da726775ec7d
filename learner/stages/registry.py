"""The built-in stages without workers that train on records of files: their kinds, classes and options.

Checks of a recipe read the options before anything is started.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headway.broker.config import MAX_TOKENS
from headway.broker.user_code.kinds import typed_options
from headway.learner.config import RecordsConfig, Schedule, StageConfig
from headway.learner.data.records.loading import open_conversations, open_labelled, open_pairs

MOST_COUNT = 2**53
"""A count keeps its value in JSON up to there."""
MOST_RECORDS = 1 << 20
"""Records of a step, which are held in memory."""
MOST_RATE = 100.0
"""An update moves each weight by about the learning rate."""
MOST_FACTOR = 1e9
"""The loss is computed in float32."""
HELD_OUT = "held_out/"
"""The beginning of the names of metrics of held-out records."""


class BestOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The measurement of the held-out records after which the model is the best one."""

    metric: str = f"{HELD_OUT}loss"
    """One of the metrics of held-out records that the stage reports."""
    mode: Literal["max", "min"] = "min"
    """Whether its largest or its smallest value is best."""


class TrainingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options that all stages over records share."""

    data: RecordsConfig
    """The records that are trained."""
    held_out: RecordsConfig | None = None
    """Records that are measured and never trained."""
    held_out_records: Annotated[int, Meta(ge=0, le=MOST_COUNT)] = 0
    """The number of records of `data` to measure instead."""
    held_out_seed: Annotated[int, Meta(ge=0, le=MOST_COUNT)] | None = 0
    """The seed that draws these records, the same ones in every run; null: the last records."""
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0
    """The longest sequence; 0: no limit."""
    too_long: Literal["refuse", "drop", "cut_end", "cut_prompt"] = "refuse"
    """A longer one is an error, is left out, loses its last tokens, or the first ones of its prompt."""
    epochs: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    """The number of times that each record is trained."""
    max_steps: Annotated[int, Meta(ge=0, le=MOST_COUNT)] = 0
    """The number of steps at which the stage ends before its epochs do; 0: it does not."""
    batch_size: Annotated[int, Meta(ge=1, le=MOST_RECORDS)] = 64
    """Records in one step."""
    batch_tokens: Annotated[int, Meta(ge=0, le=MOST_COUNT)] = 0
    """The most tokens of a step, prompts included, in place of `batch_size`: a step has as many records as fit, at
    least one. 0: it has `batch_size` records."""
    learning_rate: Annotated[float, Meta(gt=0, le=MOST_RATE)] = 1e-6
    """The highest learning rate."""
    warmup_steps: Annotated[int, Meta(ge=0, le=MOST_COUNT)] = 10
    """Steps over which the learning rate rises."""
    schedule: Schedule = "cosine"
    """The learning rate after its rise: constant, or falling along a line or a cosine to 0."""
    evaluate_every_steps: Annotated[int, Meta(ge=0, le=MOST_COUNT)] = 0
    """Steps between two measurements of the held-out records; 0: only after the last step."""
    keep: Literal["last", "best"] = "last"
    """The model that the stage leaves: of the last step, or of the best measurement."""
    best: BestOptions | None = None
    """The measurement that decides the best model, with `keep: best`; null: that of the lowest held-out loss."""
    keep_last: Annotated[int, Meta(ge=1, le=10_000)] = 1
    """The newest checkpoints that a running stage has on disk, besides the best one. One that is damaged is passed over
    for the one before it."""


class SftOptions(TrainingOptions, frozen=True, kw_only=True):
    """The conversations."""

    learning_rate: Annotated[float, Meta(gt=0, le=MOST_RATE)] = 1e-5
    """The highest learning rate."""


class LossConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A loss of the catalogue, as `headway algorithms` lists them."""

    kind: str = "dpo"
    """Its name."""
    options: dict[str, Any] = {}
    """Its options, such as beta."""


class DpoOptions(TrainingOptions, frozen=True, kw_only=True):
    """The pairs, and their loss."""

    loss: LossConfig = LossConfig()
    """The loss of a pair."""


class RewardModelOptions(TrainingOptions, frozen=True, kw_only=True):
    """The pairs, and the options of their Bradley-Terry loss (`algorithms.preferences.bradley_terry`)."""

    too_long: Literal["refuse", "drop", "cut_prompt"] = "refuse"
    """A pair with a longer sequence is an error, is left out, or loses the first tokens of its prompt: a score stands
    at the end of a response."""
    learning_rate: Annotated[float, Meta(gt=0, le=MOST_RATE)] = 1e-5
    """The highest learning rate."""
    margins: bool = False
    """Whether the score of a chosen response is to exceed the other one's by the margin that the record gives, or by
    the gap between the scores of its responses, in the units of the file."""
    centering: Annotated[float, Meta(ge=0, le=MOST_FACTOR)] = 0.0
    """The weight of the squared sum of a pair's scores, which keeps scores near 0 on average; 0.01 is usual."""


class KtoOptions(TrainingOptions, frozen=True, kw_only=True):
    """The responses with their judgements, and the options of KTO (`algorithms.preferences.kto`)."""

    beta: Annotated[float, Meta(gt=0, le=MOST_FACTOR)] = 0.1
    """The strength with which the model is held to its reference."""
    desirable_weight: Annotated[float, Meta(ge=0, le=MOST_FACTOR)] = 1.0
    """The weight of a desirable response. Raise it where these are few."""
    undesirable_weight: Annotated[float, Meta(ge=0, le=MOST_FACTOR)] = 1.0
    """The weight of an undesirable response."""


class DistillationOptions(TrainingOptions, frozen=True, kw_only=True):
    """The conversations, the teacher, and the loss (`algorithms.distillation.top_k_distillation`)."""

    teacher: Annotated[str, Meta(min_length=1)]
    """A model of the same vocabulary: a directory, a hub id, or stage:NAME."""
    top_k: Annotated[int, Meta(ge=1, le=1 << 24)] = 64
    """The teacher's likeliest tokens that the loss compares, in each place, eight bytes each on the disk. Where it is
    the vocabulary, the loss is exact."""
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    """The divergence that the loss measures between teacher and student."""
    beta: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    """The weight in jsd, which is like forward_kl near 0, and like reverse_kl near 1."""
    cross_entropy_weight: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """The share of the loss that is cross-entropy with the given tokens; the rest is the divergence."""
    learning_rate: Annotated[float, Meta(gt=0, le=MOST_RATE)] = 1e-5
    """The highest learning rate."""


@dataclass(frozen=True, kw_only=True)
class RecordStage:
    """A built-in stage: it is opened as one of the user's own is, and its options are checked before the run starts."""

    path: str
    """Its class, as `package.module:Name`."""
    options: type[TrainingOptions]
    read: Callable[[RecordsConfig, int, str], Sequence[object]]
    """(source, the run's seed, its key in the recipe) -> its records; raises ConfigError."""
    leaves_policy: bool = True
    """Whether other stages may start from its model. A stage that leaves a scorer has no model that generates."""


RECORD_STAGES: dict[str, RecordStage] = {
    "sft": RecordStage(
        path="headway.learner.stages.sft:SftStage",
        options=SftOptions,
        read=open_conversations,
    ),
    "dpo": RecordStage(path="headway.learner.stages.dpo:DpoStage", options=DpoOptions, read=open_pairs),
    "kto": RecordStage(path="headway.learner.stages.kto:KtoStage", options=KtoOptions, read=open_labelled),
    "distill": RecordStage(
        path="headway.learner.stages.distill:DistillationStage",
        options=DistillationOptions,
        read=open_conversations,
    ),
    "reward_model": RecordStage(
        path="headway.learner.stages.reward_model:RewardModelStage",
        options=RewardModelOptions,
        read=open_pairs,
        leaves_policy=False,
    ),
}


def leaves_policy(config: StageConfig) -> bool:
    """Return whether the stage leaves a policy, from which the next stage starts; a stage of the user's own does."""
    return config.kind not in RECORD_STAGES or RECORD_STAGES[config.kind].leaves_policy


def options_of(config: StageConfig, where: str) -> TrainingOptions | None:
    """Return the typed options of a built-in stage over records, None for other stages: for `sft` with phases, too.
    Raises ConfigError. `where` is the stage's key in the recipe."""
    known = RECORD_STAGES.get(config.kind) if config.is_over_records else None
    return typed_options(config.options, known.options, f"{where}.options") if known else None


def check_records(config: StageConfig, seed: int, where: str) -> None:
    """Read the files of a built-in stage over records. Raises ConfigError, with file and row, for what it cannot read.
    Sources on a hub are left to the stage."""
    options = options_of(config, where)
    if options is None:
        return
    for name, source in (("data", options.data), ("held_out", options.held_out)):
        if source is not None and not source.path.startswith(("hf:", "modelscope:")):
            RECORD_STAGES[config.kind].read(source, seed, f"{where}.options.{name}")
