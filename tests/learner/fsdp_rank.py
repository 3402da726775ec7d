"""One rank of a learner, run by torchrun: it takes two steps in every case and writes their results to a directory.

python -m torch.distributed.run --nproc-per-node 2 -m tests.learner.fsdp_rank DIRECTORY CASE...
"""

from pathlib import Path

import msgspec
import torch.distributed as dist
from safetensors.torch import save_file

import headway.learner.backends.fsdp.sharding
from headway.learner.backends import open_backend
from headway.learner.backends.base import Backend
from headway.learner.backends.fsdp.backend import FsdpBackend
from headway.learner.batching.packing import PackableSequence, concatenate, plan
from headway.learner.config import AdapterConfig, ComputeConfig, LayoutConfig
from tests.learner.tiny import OPTIMIZER, alike, model_config, ratio_loss, sequences
from tests.learner.torchrun import run_cases

LENGTHS = ([90, 6, 7, 19, 11, 3, 25, 14], [13])
"""The lengths of each step's sequences: the second step leaves a rank with none, and makes an odd row."""
BUDGET = 30


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a case, which are written as JSON on the command line."""

    architecture: str
    layout: LayoutConfig = LayoutConfig()
    compute: ComputeConfig = ComputeConfig()
    adapter: AdapterConfig | None = None
    checkpoint: str = ""
    """The directory of a checkpoint after the first step, from which the second one is taken; empty: none."""
    is_large: bool = False
    """Whether every micro-batch sends gradients over the ranks and gathers weights."""


class Result(msgspec.Struct):
    """The results of one step on one rank."""

    loss: float
    norm: float
    empty: int
    """The number of micro-batches without a sequence."""


def run(case: Case, directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    headway.learner.backends.fsdp.sharding.GATHERED_GRADIENT_BYTES = 0 if case.is_large else 1 << 30
    headway.learner.backends.fsdp.sharding.GATHERED_WEIGHT_BYTES = 0 if case.is_large else 1 << 30
    model = msgspec.structs.replace(model_config(case.architecture), adapter=case.adapter)
    backend = open_backend("fsdp", model, OPTIMIZER, seed=3, layout=case.layout, compute=case.compute)
    if case.checkpoint:
        backend.load(Path(case.checkpoint))
    results = []
    for number in range(1 if case.checkpoint else 0, len(LENGTHS)):
        results.append(step(backend, number))
        with backend.off_device():
            dist.barrier()
    assert isinstance(backend, FsdpBackend)
    tensors = {name: tensor.clone() for name, tensor in backend.named_tensors()}
    save_file(
        {"hidden": backend.hidden(concatenate(sequences(LENGTHS[1])))}, directory / f"hidden_{backend.rank}.safetensors"
    )
    backend.save(directory / "checkpoint")
    (directory / f"rank_{backend.rank}.json").write_bytes(msgspec.json.encode(results))
    if backend.rank == 0:
        save_file(tensors, directory / "tensors.safetensors")


def step_sequences(number: int) -> list[PackableSequence]:
    """Return a step's sequences; those of the first step begin alike."""
    given = sequences(LENGTHS[number], seed=number)
    return given if number else alike(given, 6)


def step(backend: Backend, number: int) -> Result:
    """Take one step; the first one computes shared tokens once."""
    packable = step_sequences(number)
    planned = plan([len(one.token_ids) for one in packable], backend.replicas, BUDGET)[backend.replica]
    batches = [concatenate([packable[index] for index in chosen], is_tree=number == 0) for chosen in planned]
    denominator = float(sum(s.loss_mask.sum() for s in packable))
    loss, norm, reports = backend.step(batches, ratio_loss(batches, denominator), 0.9, 1e-3)
    assert len(reports) == len(batches)
    return Result(loss, norm, sum(batch.num_sequences == 0 for batch in batches))


if __name__ == "__main__":
    run_cases(Case, run)
