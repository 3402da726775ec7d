"""The abilities of transformers as a runtime of scorers. This module does not import transformers."""

from rollout_workers.engines.abilities import KnownEngine
from rollout_workers.engines.embedded.abilities import EMBEDDED
from rollout_workers.scorers.runtimes.abilities import RuntimeAbilities

TRANSFORMERS = KnownEngine(
    opener="rollout_workers.scorers.runtimes.transformers.start:open_transformers",
    abilities=RuntimeAbilities(options=()),
    remedy=EMBEDDED.remedy,
    examine=EMBEDDED.examine,
)
