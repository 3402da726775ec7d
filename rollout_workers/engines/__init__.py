"""Inference engines turn prompts into tokens, each with its logprob and its weight version.

    worker ── generate ──► engine ── Chunk(tokens, logprobs, version) ──► worker
             swap_weights ──┘  requests go on; their caches are recomputed, or kept

`base.py` is the seam. `embedded/` runs any transformers model in this process (`decoder.py` is one step of it), `vllm/`
runs vLLM, and `sglang/` SGLang. `weight_loading/` brings a version's tensors into their memory. `abilities.py` states
what each can do; it imports neither torch nor an engine. `ENGINES` registers them. Here stand the GPUs that an engine
takes, too, those that each worker gets, and a lock so that engines start on a GPU one by one.

The invariant: a token is sampled by exactly the weights that its chunk names, and its logprob is the one that it was
sampled with. Keys and values come from the same weights, unless a swap was told to keep older ones.
"""

import fcntl
import inspect
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headway.broker.errors import ConfigError
from headway.broker.installation import shared_temporary_directory
from headway.broker.user_code.import_paths import ImportRoots, load, load_custom
from headway.broker.user_code.kinds import unknown_kind, unknown_option
from headway.rollout_workers.config import EngineConfig

from .abilities import EMBEDDED, REQUESTS, SGLANG, VLLM, BuiltInEngine, EngineAbilities, gpus_with

if TYPE_CHECKING:
    from .base import Engine


SLEEPING = ("sleep", "wake")
"""Methods that an engine may lack if its abilities say that it does not sleep."""

ENGINES: dict[str, BuiltInEngine[EngineAbilities]] = {"embedded": EMBEDDED, "vllm": VLLM, "sglang": SGLANG}


def abilities_of(config: EngineConfig, roots: ImportRoots | None = None) -> EngineAbilities:
    """Return the abilities of the engine `config.kind`. A user's own engine is imported to ask it, and only if `roots`
    are given; without them it counts as one that keeps every promise. Raises ConfigError if it cannot be imported."""
    if config.kind in ENGINES:
        return ENGINES[config.kind].abilities
    if roots is None or ":" not in config.kind:
        return EngineAbilities()
    stated: EngineAbilities = getattr(roots.load(config.kind, "engine.kind"), "abilities", EngineAbilities())
    return stated


def check_installed(kind: str) -> None:
    """Raise ConfigError, with the remedy, if the package of the engine `kind` is missing."""
    if known := ENGINES.get(kind):
        known.check_installed(f"engine.kind={kind}")


def check_options(config: EngineConfig, abilities: EngineAbilities, where: str = "engine") -> None:
    """Raise ConfigError for the first of the options that an engine with these abilities does not have. It passes all
    of an engine that does not state which it has. `where`: the engine's place in the recipe, after its source."""
    if abilities.options is None:
        return
    for name, value in config.options.items():
        if name not in abilities.options:
            place = where.rpartition(": ")[2]
            keys = [f"{place}.{key}" for key in EngineConfig.__struct_fields__ if key not in ("kind", "options")]
            of = f"{place}.kind={config.kind}"
            error = unknown_option(name, abilities.options, f"{where}.options", of=of, keys=keys)
            owners = [f"{place}.kind={kind}" for kind, known in ENGINES.items() if _has(known.abilities, name, value)]
            raise ConfigError(f"{error} It is one of {' and '.join(owners)}." if owners else str(error))


def _has(abilities: EngineAbilities, name: str, value: object) -> bool:
    return abilities.options is None and abilities.takes_stored(name, value)


def check_requirements(kind: str, abilities: EngineAbilities, *, tells_experts: bool, sleeps: bool) -> None:
    """Raise ConfigError if the run would ask the engine for something that its abilities exclude."""
    if tells_experts and not abilities.tells_experts:
        raise ConfigError(
            f"algorithm.router_replay needs an engine that tells which experts it chose, and engine.kind={kind} does"
            " not. Set algorithm.router_replay=false, or take another engine."
        )
    if sleeps and not abilities.sleeps:
        raise ConfigError(
            f"run.placement=colocated needs engines that sleep, and engine.kind={kind} does not. Set"
            " run.placement=separated, or take another engine."
        )


def preload(kind: str, threads: int) -> None:
    """Begin, beside this process, what opening the engine `kind` waits for, if it comes with Headway and is installed.
    `threads`: for arithmetic, unless OMP_NUM_THREADS is set. Returns at once. To be called by the main thread."""
    known = ENGINES.get(kind)
    if known is not None and known.preloader and known.is_installed():
        load(known.preloader, "engine.kind")(threads)


def libraries_of(kind: str) -> tuple[str, ...]:
    """Return the modules that take the process which opens the engine `kind` seconds to import; none of an engine that
    is not installed, or of a user's own."""
    known = ENGINES.get(kind)
    return known.libraries if known is not None and known.is_installed() else ()


def open_engine(
    config: EngineConfig,
    model_dir: Path,
    *,
    seed: int,
    tells_experts: bool = False,
    sleeps: bool = False,
    adapter_rank: int = 0,
    adapters_held: int = 1,
    roots: ImportRoots | None = None,
) -> "Engine":
    """Start the engine `config.kind` on the config.json in `model_dir`; weights come by swap_weights.

    It is called as `Class(config, model_dir, seed=seed)`. If it has parameters `tells_experts` or `sleeps`, they say
    whether it will be asked to report chosen experts, or to leave a GPU's memory to a learner; `adapter_rank` is the
    rank of the adapters that its versions carry alone, 0 for whole weights, and `adapters_held` how many of them it
    holds at a time, so that running requests finish with theirs. `roots`: the modules below which a user's
    own engine may be imported; by default Headway's own and the working directory's. Raises ConfigError for an engine
    that cannot be opened, or cannot do what will be asked of it.
    """
    roots = roots or ImportRoots()
    asked = {"tells_experts": tells_experts, "sleeps": sleeps}
    given: dict[str, Any] = {**asked, "adapter_rank": adapter_rank, "adapters_held": adapters_held}
    if config.kind not in ENGINES and ":" not in config.kind:
        raise unknown_kind(config.kind, ENGINES, "engine.kind")
    check_installed(config.kind)
    abilities = abilities_of(config, roots)
    check_options(config, abilities)
    check_requirements(config.kind, abilities, **asked)
    if config.max_concurrent is None and not abilities.fits_requests:
        config = msgspec.structs.replace(config, max_concurrent=REQUESTS)

    def started(opener: Any) -> "Engine":
        taken = inspect.signature(opener).parameters
        engine: Engine = opener(config, model_dir, seed=seed, **{name: given[name] for name in given if name in taken})
        return engine

    if known := ENGINES.get(config.kind):
        return started(load(known.opener, "engine.kind"))
    from .base import AdaptedEngine
    from .base import Engine as Seam

    not_asked = () if abilities.sleeps else SLEEPING
    seam = AdaptedEngine if adapter_rank else Seam
    own: Engine = load_custom(config.kind, seam, "engine.kind", started, roots=roots, not_asked=not_asked)
    return own


def gpus_of(engine: EngineConfig, abilities: EngineAbilities | None = None) -> int:
    """Return how many GPUs one engine takes. `abilities`: those of an imported engine; by default those that are known
    without an import. Raises ConfigError for a size that is no positive integer."""
    return gpus_with(engine.options, (abilities or abilities_of(engine)).gpu_options, "engine.options")


def visible_devices(
    devices: Sequence[int | str], engine: EngineConfig, abilities: EngineAbilities | None = None
) -> list[str]:
    """Return CUDA_VISIBLE_DEVICES for each worker: as many consecutive GPUs as an engine takes, or those that one entry
    names together.

    Raises ConfigError if the GPUs cannot be shared out evenly.
    """
    abilities = abilities or abilities_of(engine)
    gpus = gpus_of(engine, abilities)
    product = " * ".join(f"engine.options.{option}" for option in abilities.gpu_options)
    taken = f"{gpus} ({product})" if product else str(gpus)
    named = [str(device).split(",") for device in devices]
    if all(len(one) == 1 for one in named):
        if len(named) % gpus:
            raise ConfigError(
                f"workers.devices names {len(named)} GPUs, and each worker's engine takes {taken}: name a multiple of"
                f" {gpus}; consecutive ones go to one worker."
            )
        named = [[name for one in named[start : start + gpus] for name in one] for start in range(0, len(named), gpus)]
    for one in named:
        if len(one) < gpus:
            raise ConfigError(
                f"workers.devices gives {','.join(one)!r} to one worker, whose engine takes {gpus} GPUs"
                f"{f' ({product})' if product else ''}: name {gpus} of them."
            )
    return [",".join(one) for one in named]


@contextmanager
def start_lock(uuids: Iterable[str]) -> Iterator[None]:
    """Wait until no engine of this user is starting on any of these GPUs; other engines wait for the end of the block.

    vLLM measures free memory while it starts, and fails if another engine changes it meanwhile. The lock of a killed
    process is free at once.
    """
    with ExitStack() as stack:
        for uuid in sorted(uuids):  # sorted, so that two engines cannot wait for each other
            path = shared_temporary_directory() / f"headway-{os.getuid()}-{uuid}.lock"
            fcntl.flock(stack.enter_context(path.open("w")), fcntl.LOCK_EX)
        yield
