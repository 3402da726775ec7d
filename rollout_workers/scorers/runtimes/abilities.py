"""The abilities that a runtime of scorers states before it loads a model, so that no other code depends on its name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from headway.rollout_workers.engines.abilities import takes_all


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
    """Whether it holds memory for the keys and values of `cache_tokens` tokens (`cache.py`)."""
    takes_stored: Callable[[str, object], bool] = takes_all
    """Return whether the runtime takes an option of this name and value from the broker's configuration, because the
    option makes it import, read and run nothing. The default takes all: an operator's own runtime knows what its
    options do."""
