"""How many GPUs a worker's engine takes, and which ones each worker is given; engines that start on one, one by one."""

import fcntl
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from broker.errors import ConfigError
from rollout_workers.config import EngineConfig

from . import abilities_of
from .abilities import EngineAbilities


def gpus_of(engine: EngineConfig, abilities: EngineAbilities | None = None) -> int:
    """How many GPUs one engine takes. `abilities`: of an engine that was imported; by default those that are known
    without. Raises ConfigError for sizes that are none."""
    count = 1
    for option in (abilities or abilities_of(engine)).gpu_options:
        size = engine.options.get(option, 1)
        if type(size) is not int or size < 1:
            raise ConfigError(f"engine.options.{option} is {size!r}; expected an integer >= 1.")
        count *= size
    return count


def shares(devices: Sequence[int | str], engine: EngineConfig, abilities: EngineAbilities | None = None) -> list[str]:
    """CUDA_VISIBLE_DEVICES of one worker after the other: as many consecutive ones as an engine takes, or what one
    entry names together.

    Raises ConfigError where that does not come out even.
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
def starting_alone(uuids: Iterable[str]) -> Iterator[None]:
    """Wait until no engine of this user starts on any of these GPUs; the next one waits for the end of the block.

    vLLM measures how much memory is free while it starts, and fails where another engine changes that meanwhile. Who is
    killed keeps nobody waiting.
    """
    with ExitStack() as stack:
        for uuid in sorted(uuids):  # everybody in the same order
            path = Path(tempfile.gettempdir(), f"headway-{os.getuid()}-{uuid}.lock")
            fcntl.flock(stack.enter_context(path.open("w")), fcntl.LOCK_EX)
        yield
