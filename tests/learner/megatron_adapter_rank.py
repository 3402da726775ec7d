"""One rank of the megatron backend with an adapter, run by torchrun: it takes two steps in every case.

python -m torch.distributed.run --nproc-per-node 2 -m tests.learner.megatron_adapter_rank DIRECTORY CASE...

NUMBER/rank_0.json         its results, and those of every other rank
NUMBER/merged.safetensors, factors, base     tensors as engines get them, after both steps
NUMBER/first, checkpoint   after the first step, and after both
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from headway.learner.backends import open_backend
from headway.learner.batching.packing import pack
from headway.learner.checkpoint import CheckpointError
from headway.learner.config import AdapterConfig, ComputeConfig, LayoutConfig, ModelConfig
from tests.learner import fsdp_rank
from tests.learner.fsdp_rank import Result
from tests.learner.tiny import OPTIMIZER, sequences
from tests.learner.torchrun import run_cases


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a case, which are written as JSON on the command line."""

    model: str
    """The base model's directory."""
    adapter: AdapterConfig | None
    layout: LayoutConfig = LayoutConfig()
    compute: ComputeConfig = ComputeConfig()
    dtype: Any = "float32"
    checkpoint: str = ""
    """The directory of a checkpoint after the first step, from which the second one is taken; empty: none."""
    foreign: str = ""
    """A checkpoint of the other kind, of a whole model or an adapter, which must not load."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one rank."""

    steps: list[Result]
    parameters: int
    """Bytes of the parameters."""
    gradients: int
    """Bytes of the buffers of gradients."""
    optimizer: int
    """Bytes of masters and moments besides the parameters."""
    refusal: str
    """The error at the foreign checkpoint."""
    is_certain: bool
    """Whether logprobs are the same when they are asked twice, also after they were asked without the adapter."""
    without: list[float]
    """Logprobs without the adapter; of the model if it has none."""


def run(case: Case, directory: Path) -> None:
    if dist.is_initialized():
        dist.barrier()
    directory.mkdir(parents=True, exist_ok=True)
    model = ModelConfig(path=case.model, dtype=case.dtype, adapter=case.adapter)
    backend: Any = open_backend("megatron", model, OPTIMIZER, seed=3, layout=case.layout, compute=case.compute)
    if case.checkpoint:
        backend.load(Path(case.checkpoint))
    results = []
    for number in range(1 if case.checkpoint else 0, len(fsdp_rank.LENGTHS)):
        results.append(fsdp_rank.step(backend, number))
        if number == 0:
            backend.save(directory / "first")
        with backend.off_device():
            dist.barrier()
    kinds = {"merged": backend.named_tensors()}
    if case.adapter is not None:
        kinds |= {"factors": backend.factor_tensors(), "base": backend.base_tensors()}
    for kind, named in kinds.items():
        tensors = {name: tensor.detach().clone().contiguous() for name, tensor in named}
        if backend.rank == 0:
            save_file(tensors, directory / f"{kind}.safetensors")
    backend.save(directory / "checkpoint")
    batches = pack(sequences([7, 12]), 0, 1, 30)
    first = backend.logprobs(batches, 1.0)[0]
    with nullcontext() if case.adapter is None else backend.without_adapter():
        without = backend.logprobs(batches, 1.0)[0]
    again = backend.logprobs(batches, 1.0)[0]
    refusal, is_certain = _refusal(backend, case.foreign), torch.equal(first, again)
    outcome = Outcome(steps=results, **_held(backend), refusal=refusal, is_certain=is_certain, without=without.tolist())
    (directory / f"rank_{backend.rank}.json").write_bytes(msgspec.json.encode(outcome))


def _held(backend: Any) -> dict[str, int]:
    adam = backend._adam
    adam.zero_gradients()
    parameters = [parameter for model in adam.models for parameter in model.parameters()]
    buffers = [buffer for model in adam.models for buffer in (*model.buffers, *model.expert_parallel_buffers)]
    storages = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    masters = [master for part in adam.parts() for master in part.get_parameters()]
    moments = [
        state
        for part in adam.parts()
        for master in part.get_parameters()
        for key, state in part.optimizer.state[master].items()
        if key != "step"
    ]
    own = [master for master in masters if master.untyped_storage().data_ptr() not in storages]
    return {
        "parameters": sum(parameter.nbytes for parameter in parameters),
        "gradients": sum(parameter.numel() * 4 for buffer in buffers for parameter in buffer.params),
        "optimizer": sum(tensor.nbytes for tensor in (*own, *moments)),
    }


def _refusal(backend: Any, checkpoint: str) -> str:
    if not checkpoint:
        return ""
    try:
        backend.load(Path(checkpoint))
    except CheckpointError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    run_cases(Case, run)
