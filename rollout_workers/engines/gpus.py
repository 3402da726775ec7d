"""The GPUs that a worker's engine takes, those that each worker gets, and a lock so that engines start on a GPU one by
one."""

import fcntl
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from headway.broker.errors import ConfigError
from headway.broker.installation import shared_temporary_directory
from headway.rollout_workers.config import EngineConfig

from . import abilities_of
from .abilities import EngineAbilities, gpus_with


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
