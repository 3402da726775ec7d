"""One rank of a learner with a critic, run by torchrun: updates on batches larger and smaller than the number of ranks.

python -m torch.distributed.run --nproc-per-node 2 -m tests.learner.critic_rank DIRECTORY ARCHITECTURE
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from headway.learner.backends import open_backend
from headway.learner.backends.base import ValueBackend
from headway.learner.batching.batch import PackedBatch
from headway.learner.batching.packing import PackableSequence, pack, plan
from headway.learner.config import OptimizerConfig
from headway.learner.objective.critic import Critic, outcome_rewards
from headway.learner.ranks import Ranks
from tests.learner.tiny import model_config, sequences

LENGTHS = ([40, 6, 7, 19, 11, 3, 25, 14], [12], [9, 30, 4, 17])
"""The lengths of each step's sequences: the second step leaves a rank with none."""
BUDGET = 30
CLIP, GAMMA, LAM, LEARNING_RATE = 0.1, 0.98, 0.9, 3e-3
OPTIMIZER = OptimizerConfig(weight_decay=0.1, max_grad_norm=0.5, epsilon=1e-5)


class Result(msgspec.Struct):
    """The results of one step."""

    metrics: dict[str, float]
    """The metrics of the batch, then of both updates on it."""
    advantages: dict[int, list[float]]
    """The advantages of this rank's sequences, by number."""
    old_values: dict[int, list[float]]


def open_values(architecture: str, *, seed: int = 3, dtype: Any = "float32") -> ValueBackend:
    return open_backend("fsdp", model_config(architecture, dtype=dtype), OPTIMIZER, seed=seed, head="value")


def critic_of(backend: ValueBackend) -> Critic:
    ranks = Ranks.of(backend)
    return Critic(backend, ranks, clip=CLIP, gamma=GAMMA, lam=LAM, learning_rate=LEARNING_RATE)


def steps(backend: ValueBackend, budget: int = BUDGET) -> list[Result]:
    return [step(backend, sequences(lengths, seed=seed), budget) for seed, lengths in enumerate(LENGTHS)]


def step(backend: ValueBackend, given: Sequence[PackableSequence], budget: int) -> Result:
    """Make two updates on one batch, so that the second has values to clip."""
    critic = critic_of(backend)
    batches = pack(given, backend.rank, backend.world_size, budget)
    old_values = critic.values(batches)
    rewards = [outcome_rewards(batch) for batch in batches]
    returns, advantages, metrics = critic.returns_and_advantages(batches, rewards, old_values)
    for number in range(2):
        update = critic.update(batches, returns, old_values)
        metrics |= {f"{name} {number}": value for name, value in update.items()}
    chosen = plan([len(one.token_ids) for one in given], backend.world_size, budget)[backend.rank]
    numbers = [number for part in chosen for number in part]
    return Result(metrics, by_sequence(numbers, batches, advantages), by_sequence(numbers, batches, old_values))


def by_sequence(
    numbers: Sequence[int], batches: Sequence[PackedBatch], values: Sequence[torch.Tensor]
) -> dict[int, list[float]]:
    rows = zip(batches, values, strict=True)
    parts = [part.tolist() for batch, values_T in rows for part in values_T.split(batch.cu_seqlens.diff().tolist())]
    return dict(zip(numbers, parts, strict=True))


def main(directory: Path, architecture: str) -> None:
    torch.set_num_threads(1)
    backend = open_values(architecture)
    results = steps(backend)
    backend.save(directory / "checkpoint")
    (directory / f"rank_{backend.rank}.json").write_bytes(msgspec.json.encode(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
