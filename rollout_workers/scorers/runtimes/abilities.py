"""The abilities that a runtime of scorers states before it loads a model, so that no other code depends on its name.

The runtimes that come with Headway state theirs here. This module imports neither torch nor a library.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from headway.rollout_workers.engines.abilities import EMBEDDED, KnownEngine, takes_all
from headway.rollout_workers.engines.abilities import VLLM as ENGINE


@dataclass(frozen=True, kw_only=True)
class RuntimeAbilities:
    """The abilities of a runtime. The defaults are what every runtime promises, and those of a user's own, so a runtime
    states only what it lacks or adds."""

    options: tuple[str, ...] | None = None
    """The names that `scorers.engine.options` may have; None: the runtime itself checks them as it starts."""
    any_temperature: bool = True
    """Whether its teachers give logprobs at every temperature. Those of other runtimes give them at 1 alone."""
    gpu_options: tuple[str, ...] = ()
    """The names in `scorers.engine.options` whose product is the number of GPUs of one process."""
    step_tokens: Mapping[str, int] = field(default_factory=dict)
    """By the kind of scorer, the most tokens that go through the model at once; without one, all of a batch do."""
    keeps_cache: bool = False
    """Whether it holds memory for the keys and values of `cache_tokens` tokens."""
    takes_stored: Callable[[str, object], bool] = takes_all
    """Return whether the runtime takes an option of this name and value from the broker's configuration, because the
    option makes it import, read and run nothing. The default takes all: an operator's own runtime knows what its
    options do."""


BLOCK_TOKENS = 256
"""At least the tokens of a block of any runtime's cache. One block is never used, and one is not full."""


def cache_tokens(batch_tokens: int, most_tokens: int) -> int:
    """Return the number of tokens whose keys and values a runtime with a cache holds: those of a batch, and of the
    longest request besides, which may be a batch of its own."""
    return batch_tokens + most_tokens + 2 * BLOCK_TOKENS


TRANSFORMERS = KnownEngine(
    opener="headway.rollout_workers.scorers.runtimes.transformers_runtime:open_transformers",
    abilities=RuntimeAbilities(options=()),
    remedy=EMBEDDED.remedy,
    examine=EMBEDDED.examine,
)


STEP_TOKENS = {"reward_model": 8192, "teacher": 2048}
"""The most tokens that go through a model at once. A teacher's logits of so many tokens lie in memory twice."""

VLLM = KnownEngine(
    opener="headway.rollout_workers.scorers.runtimes.vllm_runtime:open_vllm",
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
