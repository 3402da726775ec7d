"""The abilities of transformers as a runtime of scorers. This module does not import transformers."""

from headway.rollout_workers.engines.abilities import KnownEngine
from headway.rollout_workers.engines.embedded.abilities import EMBEDDED
from headway.rollout_workers.scorers.runtimes.abilities import RuntimeAbilities

TRANSFORMERS = KnownEngine(
    opener="headway.rollout_workers.scorers.runtimes.transformers.start:open_transformers",
    abilities=RuntimeAbilities(options=()),
    remedy=EMBEDDED.remedy,
    examine=EMBEDDED.examine,
)
