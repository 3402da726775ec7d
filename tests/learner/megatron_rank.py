"""One rank of the megatron backend, run by torchrun: it takes these steps in every case and writes their results.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.learner.megatron_rank DIRECTORY CASE...

    NUMBER/start, reference ─► one step ─► one, followed ─► broken step ─► broken ─► another step ─► two
                                            └─ loaded ─► loaded ─► off the device ─► the same step ─► again

Each name is a checkpoint beside the exported tensors of that moment. Megatron is patched for a CPU process-wide, so no
backend is opened in the process of the tests.
"""

import math
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from headway.learner.backends import open_backend
from headway.learner.backends.base import Backend
from headway.learner.batching.batch import PackedBatch
from headway.learner.batching.packing import pack
from headway.learner.checkpoint import CheckpointError
from headway.learner.config import LayoutConfig, ModelConfig
from tests.learner.tiny import OPTIMIZER, model_config, ratio_loss, sequences
from tests.learner.torchrun import run_cases

LENGTHS = [20, 6, 7, 19, 11, 3, 25, 14]
BUDGET = 40
LEARNING_RATE = 1e-3
TEMPERATURE = 0.9
DECAY = 0.7
REFERENCE_SEED = 7


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a case, which are written as JSON on the command line."""

    architecture: str
    dtype: Any
    model: str
    """The model's Hugging Face directory, in fp32."""
    others: list[str]
    """Checkpoints of other models; each attempt to load one has to fail."""
    layout: LayoutConfig = LayoutConfig()


class Result(msgspec.Struct):
    """The results of one rank, besides the files that it wrote."""

    replica: int
    logprobs: list[list[float]]
    """The logprobs of its replica's tokens: at the start, after a step, and after loading."""
    is_broken_norm_finite: bool
    refusals: list[str]
    """The errors at checkpoints of other models."""
    shims: int
    """The number of times that Megatron was patched."""
    gradient_bytes: tuple[int, int]
    """The size of the gradient buffers of the policy, which was trained, and of the reference."""
    away_bytes: int
    """Bytes of the policy's parameters, masters, moments and gradients while it was off the device."""


def run(case: Case, directory: Path) -> None:
    if dist.is_initialized():
        dist.barrier()
    directory.mkdir(parents=True, exist_ok=True)
    policy = _open(ModelConfig(path=case.model, dtype=case.dtype), case)
    reference = _open(model_config(case.architecture, dtype=case.dtype), case, REFERENCE_SEED)
    _write(policy, directory / "start")
    _write(reference, directory / "reference")
    logprobs = [_logprobs(policy)]
    _step(policy, 0)
    _write(policy, directory / "one")
    logprobs.append(_logprobs(policy))
    reference.follow(policy, DECAY)
    _write(reference, directory / "followed")
    broken_norm = _broken_step(policy)
    _write(policy, directory / "broken")
    _step(policy, 1)
    _write(policy, directory / "two")
    policy.load(directory / "one")
    _write(policy, directory / "loaded")
    logprobs.append(_logprobs(policy))
    with policy.off_device():
        away_bytes = _held_bytes(policy)
    _step(policy, 1)
    _write(policy, directory / "again")
    refusals = [_refusal(policy, Path(other)) for other in case.others]
    gradient_bytes = _gradient_bytes(policy), _gradient_bytes(reference)
    is_finite, shims = math.isfinite(broken_norm), torch._C._len_torch_function_stack()
    result = Result(policy.replica, logprobs, is_finite, refusals, shims, gradient_bytes, away_bytes)
    (directory / f"rank_{policy.rank}.msgpack").write_bytes(msgspec.msgpack.encode(result))


def _open(model: ModelConfig, case: Case, seed: int = 0) -> Backend:
    return open_backend("megatron", model, OPTIMIZER, seed=seed, layout=case.layout)


def _write(backend: Backend, path: Path) -> None:
    """Write the checkpoint, and its tensors as engines get them."""
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in backend.named_tensors()}
    backend.save(path)
    if backend.rank == 0:
        save_file(tensors, path.with_suffix(".safetensors"))


def batches_of(replica: int, replicas: int, number: int) -> list[PackedBatch]:
    """Return the batches of step `number`."""
    return pack(sequences(LENGTHS, seed=number), replica, replicas, BUDGET)


def _logprobs(backend: Backend) -> list[float]:
    given = backend.logprobs(batches_of(backend.replica, backend.replicas, 0), TEMPERATURE)
    return [float(value) for value in torch.cat(given)]


def _step(backend: Backend, number: int) -> None:
    batches = batches_of(backend.replica, backend.replicas, number)
    backend.step(batches, ratio_loss(batches, 50.0), TEMPERATURE, LEARNING_RATE)


def _broken_step(backend: Backend) -> float:
    """Take a step in which no gradient is a number."""
    batches = batches_of(backend.replica, backend.replicas, 0)

    def not_a_number(_: int, logprobs_T: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        return (logprobs_T * torch.inf).sum(), {}

    return backend.step(batches, not_a_number, TEMPERATURE, LEARNING_RATE)[1]


def _gradient_bytes(backend: Backend) -> int:
    models = backend._adam.models  # type: ignore[attr-defined]
    buffers = [buffer for model in models for buffer in (*model.buffers, *model.expert_parallel_buffers)]
    return sum(buffer.grad_data.untyped_storage().size() for buffer in buffers)


def _held_bytes(backend: Backend) -> int:
    tensors = backend._adam.tensors()  # type: ignore[attr-defined]
    return _gradient_bytes(backend) + sum(tensor.untyped_storage().size() for tensor in tensors)


def _refusal(backend: Backend, checkpoint: Path) -> str:
    try:
        backend.load(checkpoint)
    except CheckpointError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    run_cases(Case, run)
