"""What a checkpoint needs besides the Hugging Face model: fp32 parameters, AdamW's moments, RNG states.

Parameters and moments go through torch.distributed.checkpoint, every rank its shards, so another number of
ranks can load them. RNG states are one file a rank.
"""

import random
import warnings
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from learner.checkpoint import CheckpointError

from .optimizer import allocate_moments

STATE_FOLDER = "training_state"
RNG_FOLDER = "rng"

Tensors = dict[str, torch.Tensor]


class RngState(msgspec.Struct, frozen=True, kw_only=True):
    """The process-wide generators of one rank."""

    torch_cpu: bytes
    torch_cuda: bytes
    """Of the rank's own device; empty on a CPU."""
    numpy_key: list[int]
    numpy_position: int
    numpy_gauss: tuple[int, float]
    python_version: int
    python_key: list[int]
    python_gauss: float | None


def _tensors(model: nn.Module, optimizer: torch.optim.AdamW) -> Tensors:
    """The live tensors by name: saving reads them, loading writes into them."""
    allocate_moments(optimizer)
    tensors: Tensors = {f"model.{name}": buffer for name, buffer in model.named_buffers()}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{key}"] = value
    return tensors


def save_state(model: nn.Module, optimizer: torch.optim.AdamW, directory: Path) -> None:
    """Collective; torch syncs the files."""
    with warnings.catch_warnings():
        _silence_torch()
        save(_tensors(model, optimizer), checkpoint_id=directory / STATE_FOLDER)


def load_state(model: nn.Module, optimizer: torch.optim.AdamW, directory: Path) -> None:
    """Collective."""
    try:
        with warnings.catch_warnings():
            _silence_torch()
            load(_tensors(model, optimizer), checkpoint_id=directory / STATE_FOLDER)
    except (OSError, CheckpointException) as error:
        raise CheckpointError(
            f"{directory} does not hold a training state that fits this model: {_first_line(error)}. "
            "Resume with the `model` section that the checkpoint was written with."
        ) from error


def _silence_torch() -> None:
    """torch.distributed.checkpoint warns of its own deprecated calls, which a user cannot mend."""
    warnings.simplefilter("ignore", FutureWarning)
    warnings.simplefilter("ignore", UserWarning)


def _first_line(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return str(error).strip().splitlines()[0]


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


def save_rng(directory: Path, rank: int, device: torch.device) -> None:
    path = directory / RNG_FOLDER / f"rank_{rank}.msgpack"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(msgspec.msgpack.encode(capture_rng(device)))


def load_rng(directory: Path, rank: int, device: torch.device) -> None:
    """Ranks that the saving run did not have keep their generators as they are."""
    path = directory / RNG_FOLDER / f"rank_{rank}.msgpack"
    if path.exists():
        restore_rng(msgspec.msgpack.decode(path.read_bytes(), type=RngState), device)
