"""What an engine states of itself before it is started, so that nobody asks for it by its name."""

from collections.abc import Callable
from dataclasses import dataclass

from broker.installation import TorchFacts


def _always(option: str, value: object) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class EngineAbilities:
    """A class or function of the user's own may have them as its attribute `abilities`. The defaults are what every
    engine promises (`base.py`), so that an engine states only what it lacks or adds."""

    gpu_options: tuple[str, ...] = ()
    """Those of `engine.options` whose product is the number of GPUs that one engine takes."""
    follows_device: bool = False
    """It runs on `engine.device`; any other engine takes the GPUs that its process sees."""
    sleeps: bool = True
    """It can leave the device's memory to a learner, as `run.placement=colocated` needs it."""
    sleep_option: str = ""
    """One of `engine.options` that forbids it to sleep when it is false; empty: there is none."""
    tells_experts: bool = True
    """It can report which experts it chose, as `algorithm.router_replay` needs it."""
    takes_stored: Callable[[str, object], bool] = _always
    """Whether it takes an option of this name and value from the configuration in the broker, because the option makes
    it import, read and run nothing. By default it does: an engine of the operator's own knows what its options do."""


@dataclass(frozen=True, kw_only=True)
class KnownEngine:
    """An engine that comes with Headway."""

    opener: str
    """Import path of what opens it, called like a class of the user's own."""
    abilities: EngineAbilities
    package: tuple[str, str] | None = None
    """(module, name) of what must be installed besides Headway."""
    remedy: str
    """How to install what it needs."""
    examine: Callable[[TorchFacts], tuple[bool, str]]
    """(whether it works on this machine, what was found), for `headway doctor`."""
