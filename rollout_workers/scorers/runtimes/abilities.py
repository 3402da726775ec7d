"""The abilities that a runtime of scorers states before it loads a model, so that no other code depends on its name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from broker.errors import ConfigError
from broker.installation import TorchFacts
from rollout_workers.config import ScorerEngineConfig


def _always(option: str, value: object) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class RuntimeAbilities:
    """The abilities of a runtime. The defaults are what every runtime promises, and those of a user's own, so a runtime
    states only what it lacks or adds."""

    any_temperature: bool = True
    """Whether its teachers give logprobs at every temperature. Those of other runtimes give them at 1 alone."""
    gpu_options: tuple[str, ...] = ()
    """The names in `scorers.engine.options` whose product is the number of GPUs of one process."""
    step_tokens: Mapping[str, int] = field(default_factory=dict)
    """By the kind of scorer, the most tokens that go through the model at once; without one, all of a batch do."""
    keeps_cache: bool = False
    """Whether it holds memory for the keys and values of `cache_tokens` tokens (`cache.py`)."""
    takes_stored: Callable[[str, object], bool] = _always
    """Return whether the runtime takes an option of this name and value from the broker's configuration, because the
    option makes it import, read and run nothing. The default takes all: an operator's own runtime knows what its
    options do."""


@dataclass(frozen=True, kw_only=True)
class KnownRuntime:
    """A runtime that comes with Headway."""

    opener: str
    """Import path of the function that opens it, called like a user's own class."""
    abilities: RuntimeAbilities
    package: tuple[str, str] | None = None
    """(module, name) of the package that must be installed besides Headway."""
    remedy: str
    """The command or advice that installs what it needs."""
    examine: Callable[[TorchFacts], tuple[bool, str]]
    """Return whether the runtime works on this machine and what was found, for `headway doctor`."""


def gpus_with(config: ScorerEngineConfig, abilities: RuntimeAbilities) -> int:
    """Return how many GPUs one process of a runtime with these abilities takes. Raises ConfigError for a size that is
    no positive integer."""
    count = 1
    for option in abilities.gpu_options:
        size = config.options.get(option, 1)
        if type(size) is not int or size < 1:
            raise ConfigError(f"scorers.engine.options.{option} is {size!r}; expected an integer >= 1.")
        count *= size
    return count
