# mypy: disable-error-code="index"
"""One rank of a learner that replays experts, run by torchrun: it writes each case's logprobs and a step's results, for
samples by themselves and for those that share tokens.

python -m torch.distributed.run --nproc-per-node 2 -m tests.learner.replay_rank DIRECTORY CASE...
"""

import sys
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from headway.learner.backends import open_backend
from headway.learner.batching.batch import PackedBatch
from headway.learner.batching.clusters import pack_units
from headway.learner.batching.packing import PackableSequence
from headway.learner.config import ComputeConfig, LayoutConfig
from tests.learner.replayed import EXPERTS, LENGTHS, TEMPERATURE, model, with_experts
from tests.learner.tiny import OPTIMIZER, alike, ratio_loss, sequences

BUDGET = 24
DENOMINATOR = 50.0


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a case, which are written as JSON on the command line."""

    backend: str
    layout: LayoutConfig = LayoutConfig()
    compute: ComputeConfig = ComputeConfig()


class Result(msgspec.Struct):
    """The results of one rank."""

    replica: int
    logprobs: list[float]
    norm: float
    disagreement: dict[str, float]


def samples(*, is_shared: bool) -> list[PackableSequence]:
    """Return samples with experts. Those that share tokens are of two groups, in each of which one has other experts
    in the middle of what is shared."""
    if not is_shared:
        return with_experts(sequences(LENGTHS), EXPERTS)
    given = []
    for seed, count in ((0, 7), (1, 5)):
        group = with_experts(alike(sequences([12, 9, 14], seed), count), EXPERTS, seed)
        for one in group[1:]:
            one.experts[:count] = group[0].experts[:count]
        group[-1].experts[count - 2, 1] = (group[0].experts[count - 2, 1] + 1) % EXPERTS
        given += group
    return given


def batches_of(replica: int, replicas: int, *, is_shared: bool) -> list[PackedBatch]:
    rows = pack_units(
        [[one] for one in samples(is_shared=is_shared)],
        replica=replica,
        replicas=replicas,
        micro_batch_tokens=BUDGET,
        prefix_sharing="always" if is_shared else "never",
    )
    return [row.batch for row in rows]


def run(case: Case) -> tuple[int, list[Result]]:
    """Return this rank, and the results for samples by themselves and for those that share tokens."""
    backend = open_backend(case.backend, model(), OPTIMIZER, seed=1, layout=case.layout, compute=case.compute)
    results = []
    for is_shared in (False, True):
        batches = batches_of(backend.replica, backend.replicas, is_shared=is_shared)
        logprobs = torch.cat(backend.logprobs(batches, TEMPERATURE)).tolist()
        _, norm, reports = backend.step(batches, ratio_loss(batches, DENOMINATOR), TEMPERATURE, learning_rate=0.0)
        disagreement = {name: value for report in reports for name, value in report.items() if "disagree" in name}
        results.append(Result(backend.replica, logprobs, norm, disagreement))
    return backend.rank, results


def main(directory: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    for number, text in enumerate(cases):
        rank, results = run(msgspec.json.decode(text, type=Case))
        (directory / f"{number}_{rank}.json").write_bytes(msgspec.json.encode(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
