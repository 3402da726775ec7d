"""One rank of a learner that replays experts, run by torchrun: it writes each case's logprobs and one step's results.

python -m torch.distributed.run --nproc-per-node 2 -m tests.learner.replay_rank DIRECTORY CASE...
"""

import sys
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from learner.backends import open_backend
from learner.config import ComputeConfig, LayoutConfig
from learner.rows.batch import PackedBatch
from learner.rows.packing import pack
from tests.learner.replayed import EXPERTS, LENGTHS, TEMPERATURE, model, with_experts
from tests.learner.tiny import OPTIMIZER, ratio_loss, sequences

BUDGET = 24
DENOMINATOR = 50.0


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a case, which are written as JSON on the command line."""

    backend: str
    layout: LayoutConfig = LayoutConfig()
    compute: ComputeConfig = ComputeConfig()
    is_replayed: bool = True


class Result(msgspec.Struct):
    """The results of one rank."""

    replica: int
    logprobs: list[float]
    norm: float
    disagreement: dict[str, float]


def batches_of(replica: int, replicas: int, *, is_replayed: bool = True) -> list[PackedBatch]:
    given = sequences(LENGTHS)
    return pack(with_experts(given, EXPERTS) if is_replayed else given, replica, replicas, BUDGET)


def run(case: Case) -> tuple[int, Result]:
    backend = open_backend(case.backend, model(), OPTIMIZER, seed=1, layout=case.layout, compute=case.compute)
    batches = batches_of(backend.replica, backend.replicas, is_replayed=case.is_replayed)
    logprobs = torch.cat(backend.logprobs(batches, TEMPERATURE)).tolist()
    _, norm, reports = backend.step(batches, ratio_loss(batches, DENOMINATOR), TEMPERATURE, 1e-3)
    disagreement = {name: value for report in reports for name, value in report.items() if "disagree" in name}
    return backend.rank, Result(backend.replica, logprobs, norm, disagreement)


def main(directory: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    for number, text in enumerate(cases):
        rank, result = run(msgspec.json.decode(text, type=Case))
        (directory / f"{number}_{rank}.json").write_bytes(msgspec.json.encode(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
