"""The abilities of vLLM as a runtime of scorers. This module does not import vLLM."""

from headway.rollout_workers.engines.abilities import KnownEngine
from headway.rollout_workers.engines.vllm.abilities import VLLM as ENGINE
from headway.rollout_workers.scorers.runtimes.abilities import RuntimeAbilities

STEP_TOKENS = {"reward_model": 8192, "teacher": 2048}
"""The most tokens that go through a model at once. A teacher's logits of so many tokens lie in memory twice."""

VLLM = KnownEngine(
    opener="headway.rollout_workers.scorers.runtimes.vllm.start:open_vllm",
    abilities=RuntimeAbilities(
        any_temperature=False,
        gpu_options=ENGINE.abilities.gpu_options,
        step_tokens=STEP_TOKENS,
        keeps_cache=True,
        takes_stored=ENGINE.abilities.takes_stored,
    ),
    package=ENGINE.package,
    remedy=ENGINE.remedy,
    examine=ENGINE.examine,
)
