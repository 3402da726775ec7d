"""The stages without workers that come with Headway and train on records of files, by their kind."""

from dataclasses import dataclass

from broker.user_code.options import typed_options
from learner.config import StageConfig

from .supervised.options import PreferenceOptions, TrainingOptions


@dataclass(frozen=True, kw_only=True)
class KnownStage:
    """A built-in stage: it is opened as one of the user's own is, and its options are checked before the run starts."""

    path: str
    """Its class, as `package.module:Name`."""
    options: type[TrainingOptions]


KNOWN: dict[str, KnownStage] = {
    "dpo": KnownStage(path="learner.stages.supervised.preferences:PreferenceStage", options=PreferenceOptions),
}


def options_of(config: StageConfig, where: str) -> TrainingOptions | None:
    """Return the typed options of a built-in stage over records, None for other stages. Raises ConfigError. `where` is
    the stage's key in the recipe."""
    known = KNOWN.get(config.kind)
    return typed_options(config.options, known.options, f"{where}.options") if known else None
