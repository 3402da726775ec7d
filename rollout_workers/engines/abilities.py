"""The abilities that an engine states before it starts, so that no other code depends on its name."""

from collections.abc import Callable
from dataclasses import dataclass

from broker.installation import TorchFacts


def _always(option: str, value: object) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class EngineAbilities:
    """The abilities of an engine. A user's own class or function may have them as its attribute `abilities`. The
    defaults are what every engine promises (`base.py`), so an engine states only what it lacks or adds."""

    gpu_options: tuple[str, ...] = ()
    """The names in `engine.options` whose product is the number of GPUs of one engine."""
    follows_device: bool = False
    """Whether the engine runs on `engine.device`; any other engine takes the GPUs that its process sees."""
    sleeps: bool = True
    """Whether it can leave the device's memory to a learner, as `run.placement=colocated` needs."""
    sleep_option: str = ""
    """The name in `engine.options` that forbids it to sleep when it is false; empty if there is none."""
    memory_option: str = ""
    """The name in `engine.options` of the part of a GPU's memory that one engine takes; empty if it takes only what its
    model needs."""
    memory_share: float = 0.0
    """The same part where the option is not given."""
    tells_experts: bool = True
    """Whether it can report which experts it chose, as `algorithm.router_replay` needs."""
    takes_stored: Callable[[str, object], bool] = _always
    """Return whether the engine takes an option of this name and value from the broker's configuration, because the
    option makes it import, read and run nothing. The default takes all: an operator's own engine knows what its options
    do."""


@dataclass(frozen=True, kw_only=True)
class KnownEngine:
    """An engine that comes with Headway."""

    opener: str
    """Import path of the class or function that opens it, called like a user's own class."""
    abilities: EngineAbilities
    package: tuple[str, str] | None = None
    """(module, name) of the package that must be installed besides Headway."""
    remedy: str
    """The command or advice that installs what it needs."""
    examine: Callable[[TorchFacts], tuple[bool, str]]
    """Return whether the engine works on this machine and what was found, for `headway doctor`."""
