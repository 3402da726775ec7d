"""The options of stages that train on records. Checks of a recipe read them before anything is started."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from .schedule import Shape


class TrainingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options that all stages over records share."""

    path: str
    """The file of the records that are trained."""
    held_out_path: str = ""
    """A second file, whose records are measured and never trained."""
    held_out_records: Annotated[int, Meta(ge=0)] = 0
    """The number of last records of the first file to measure instead."""
    epochs: Annotated[float, Meta(gt=0)] = 1.0
    """How often each record is trained."""
    max_steps: Annotated[int, Meta(ge=0)] = 0
    """The number of steps at which the stage ends before its epochs do; 0: it does not."""
    batch_size: Annotated[int, Meta(ge=1)] = 64
    """Records in one step."""
    learning_rate: Annotated[float, Meta(gt=0)] = 1e-6
    """The highest learning rate."""
    warmup_steps: Annotated[int, Meta(ge=0)] = 10
    """Steps over which the learning rate rises."""
    schedule: Shape = "cosine"
    """The learning rate after its rise: constant, or falling along a line or a cosine to 0."""
    evaluate_every_steps: Annotated[int, Meta(ge=0)] = 0
    """Steps between two measurements of the held-out records; 0: only after the last step."""
    keep: Literal["last", "best"] = "last"
    """The model that the stage leaves: of the last step, or of the measurement with the lowest held-out loss."""


class PreferenceOptions(TrainingOptions, frozen=True, kw_only=True):
    """The pairs, and the loss of a pair."""

    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """The loss of a pair: see `algorithms.supervised.dpo`."""
    beta: Annotated[float, Meta(gt=0)] = 0.1
    """How much a reward counts: the strength with which the model is held to its reference."""
    label_smoothing: Annotated[float, Meta(ge=0, lt=0.5)] = 0.0
    """The share of pairs believed to be labelled the wrong way round."""
