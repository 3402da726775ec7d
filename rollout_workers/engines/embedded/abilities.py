"""The abilities of the embedded engine. This module does not import the engine."""

from headway.broker.installation import TorchFacts, version_of
from headway.rollout_workers.engines.abilities import EngineAbilities, KnownEngine


def _examine(torch: TorchFacts) -> tuple[bool, str]:
    transformers = version_of("transformers")
    works = bool(torch.version) and transformers is not None
    return works, torch.problem or f"torch {torch.version}, transformers {transformers or 'missing'}"


EMBEDDED = KnownEngine(
    opener="headway.rollout_workers.engines.embedded.engine:open_embedded",
    abilities=EngineAbilities(options=(), follows_device=True, takes_adapters=True),
    remedy="pip install headway installs both.",
    examine=_examine,
)
