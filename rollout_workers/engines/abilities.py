"""The abilities that an engine states before it starts, so that no other code depends on its name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from headway.broker.errors import ConfigError
from headway.broker.installation import TorchFacts, is_installed

A = TypeVar("A")

Adapted = Literal["dense", "attention", "experts"]
"""The weights that an adapter changes: some of a model without experts; attention alone of a model with experts; others
of such a model, its experts for one."""


REQUESTS = 64
"""Requests at a time of an engine that cannot find out how many fit, and of any engine on a CPU: more would take longer
there, and no more a second."""


def takes_all(option: str, value: object) -> bool:
    """Return True: an option of any name and value may come from the broker's configuration."""
    return True


@dataclass(frozen=True, kw_only=True)
class EngineAbilities:
    """The abilities of an engine. A user's own class or function may have them as its attribute `abilities`. The
    defaults are what every engine promises (`base.py`), so an engine states only what it lacks or adds."""

    options: tuple[str, ...] | None = None
    """The names that `engine.options` may have; None: the engine itself checks them as it starts."""
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
    sizing_option: str = ""
    """The name in `engine.options` with which the engine takes so much memory without measuring what is free, so that
    it may start beside others on its GPU; empty if there is none."""
    fits_requests: bool = False
    """Whether it finds out how many requests fit where `engine.max_concurrent` is null; any other engine is told
    `REQUESTS` then."""
    tells_experts: bool = True
    """Whether it can report which experts it chose, as `algorithm.router_replay` needs."""
    takes_adapters: bool = False
    """Whether it takes versions that carry an adapter alone (`base.AdaptedEngine`)."""
    takes_expert_adapters: bool = True
    """Whether these adapters may be of a model with experts."""
    takes_attention_adapters: bool = False
    """Whether they may be of a model with experts if they change attention alone, where others may not."""
    takes_full_adapters: bool = True
    """Whether a GPU's engine in float32 takes them."""
    splits_adapters_by: tuple[str, ...] = ()
    """Those of `gpu_options` with which an engine on several GPUs takes adapters and proves what it holds of them."""
    holds_adapters: bool = False
    """Whether it holds several of them, so that running requests finish with theirs (`weights.kv_policy=finish`)."""
    takes_stored: Callable[[str, object], bool] = takes_all
    """Return whether the engine takes an option of this name and value from the broker's configuration, because the
    option makes it import, read and run nothing. The default takes all: an operator's own engine knows what its options
    do."""

    def said(self, options: Mapping[str, object]) -> dict[str, Any]:
        """Return the options that an engine is started with: a null as the part of the memory says nothing."""
        return {name: value for name, value in options.items() if name != self.memory_option or value is not None}


@dataclass(frozen=True, kw_only=True)
class KnownEngine(Generic[A]):
    """An engine that comes with Headway: of workers, or of scorers. `A`: the abilities that such engines state."""

    opener: str
    """Import path of the class or function that opens it, called like a user's own class."""
    abilities: A
    package: tuple[str, str] | None = None
    """(module, name) of the package that must be installed besides Headway."""
    preloader: str = ""
    """Import path of a function that begins, beside its process, what opening the engine waits for. It takes the number
    of threads for arithmetic and returns at once."""
    libraries: tuple[str, ...] = ()
    """Modules that take the process that opens the engine seconds to import."""
    remedy: str
    """The command or advice that installs what it needs."""
    examine: Callable[[TorchFacts], tuple[bool, str]]
    """Return whether the engine works on this machine and what was found, for `headway doctor`."""

    def check_installed(self, setting: str) -> None:
        """Raise ConfigError, with the remedy, if its package is missing. `setting`: what asks for it, such as
        `engine.kind=vllm`."""
        if self.package is not None and not self.is_installed():
            raise ConfigError(f"{setting} needs {self.package[1]}, which is not installed. {self.remedy}")

    def is_installed(self) -> bool:
        """Whether its package is here."""
        return self.package is None or is_installed(self.package[0])


def gpus_with(options: Mapping[str, object], gpu_options: Sequence[str], key: str) -> int:
    """Return the product of those options of an engine that say how many GPUs it takes; one that is not given counts as
    1. `key`: the options' place in the recipe. Raises ConfigError for a size that is no positive integer."""
    count = 1
    for option in gpu_options:
        size = options.get(option, 1)
        if type(size) is not int or size < 1:
            raise ConfigError(f"{key}.{option} is {size!r}; expected an integer >= 1.")
        count *= size
    return count
