"""The process-wide random generators of every rank in a checkpoint, one file for each rank."""

import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch

RNG_FOLDER = "rng"


class RngState(msgspec.Struct, frozen=True, kw_only=True):
    """The states of one rank's process-wide generators."""

    torch_cpu: bytes
    torch_cuda: bytes
    """The state of the rank's own device; empty on a CPU."""
    numpy_key: list[int]
    numpy_position: int
    numpy_gauss: tuple[int, float]
    python_version: int
    python_key: list[int]
    python_gauss: float | None


def capture_rng(device: torch.device) -> RngState:
    _, numpy_key, numpy_position, has_gauss, cached = np.random.get_state(legacy=True)
    python_version, python_key, python_gauss = random.getstate()
    is_cuda = device.type == "cuda"
    return RngState(
        torch_cpu=torch.get_rng_state().numpy().tobytes(),
        torch_cuda=torch.cuda.get_rng_state(device).numpy().tobytes() if is_cuda else b"",
        numpy_key=np.asarray(numpy_key).tolist(),
        numpy_position=int(numpy_position),
        numpy_gauss=(int(has_gauss), float(cached)),
        python_version=python_version,
        python_key=list(python_key),
        python_gauss=python_gauss,
    )


def restore_rng(state: RngState, device: torch.device) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(state.torch_cpu), dtype=torch.uint8))
    if state.torch_cuda and device.type == "cuda":
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(state.torch_cuda), dtype=torch.uint8), device)
    key = np.asarray(state.numpy_key, dtype=np.uint32)
    np.random.set_state(("MT19937", key, state.numpy_position, *state.numpy_gauss))
    random.setstate((state.python_version, tuple(state.python_key), state.python_gauss))


def snapshot_rng(directory: Path, rank: int, device: torch.device) -> Callable[[], None]:
    """Return a function that writes the generators' states as they are now."""
    encoded = msgspec.msgpack.encode(capture_rng(device))
    path = directory / RNG_FOLDER / f"rank_{rank}.msgpack"

    def write() -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encoded)

    return write


def load_rng(directory: Path, rank: int, device: torch.device) -> None:
    """Restore this rank's generators. Ranks that the saving run did not have keep theirs."""
    path = directory / RNG_FOLDER / f"rank_{rank}.msgpack"
    if path.exists():
        restore_rng(msgspec.msgpack.decode(path.read_bytes(), type=RngState), device)
