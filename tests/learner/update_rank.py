"""One rank of a learner, run by torchrun: updates on batches larger and smaller than the number of ranks.

python -m torch.distributed.run --nproc-per-node 2 -m tests.learner.update_rank DIRECTORY
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from headway.algorithms.presets import PRESETS
from headway.learner.algorithm_config import AlgorithmConfig
from headway.learner.backends import open_backend
from headway.learner.batching.packing import Candidates, PackableSequence
from headway.learner.objective.composition import needs_critic
from headway.learner.objective.critic import Critic
from headway.learner.objective.loss import Objective
from headway.learner.ranks import Ranks
from tests.learner.tiny import OPTIMIZER, VOCABULARY, model_config, sequences
from tests.learner.updaters import open_updater

MODEL = model_config("qwen3")
SIZES = (6, 1)
"""The number of sequences or pairs in each batch: the last one leaves a rank with none."""
PRESETS_TRIED = (
    ("grpo", 1),
    ("candidates", 2),
    ("m2po", 2),
    ("distillation", 2),
    ("online_dpo", 2),
    ("ppo", 2),
    ("entropy", 2),
)
"""Presets with their number of updates a step; the mask of m2po is one of all ranks, anew in each update."""
OF_PAIRS = ("online_dpo", 2)
TAUGHT = ("candidates", 2)
CRITICIZED = ("ppo", 2)
WITH_BONUS = ("entropy", 2)
"""The case that trains another backend too; the last batch of pairs has no pair at all."""


CANDIDATES = 3
ALGORITHMS = {
    **{name: preset.algorithm for name, preset in PRESETS.items()},
    "entropy": {**PRESETS["tis"].algorithm, "entropy_coefficient": 0.5},
    "candidates": {
        **PRESETS["distillation"].algorithm,
        "distillation": {"coefficient": 1.0, "place": "loss", "top_k": CANDIDATES},
    },
}


def all_updates() -> list[dict[str, float]]:
    return [update for preset, count in PRESETS_TRIED for update in updates(preset, count)]


def other_updates(backend_kind: str) -> list[dict[str, float]]:
    return [
        *updates(*OF_PAIRS, backend_kind, sizes=(*SIZES, 0)),
        *updates(*TAUGHT, backend_kind),
        *updates(*CRITICIZED, backend_kind),
        *updates(*WITH_BONUS, backend_kind),
    ]


def updates(
    preset: str, updates_per_step: int, backend_kind: str = "fsdp", sizes: Sequence[int] = SIZES
) -> list[dict[str, float]]:
    torch.set_num_threads(1)
    algorithm = msgspec.convert(ALGORITHMS[preset], AlgorithmConfig)
    backend = open_backend(backend_kind, MODEL, OPTIMIZER, seed=3)
    objective = Objective(algorithm)
    reference = open_backend(backend_kind, MODEL, OPTIMIZER, seed=4) if objective.needs_reference else None
    critic = critic_of(backend_kind) if needs_critic(algorithm) else None
    learner = {"updates_per_step": updates_per_step}
    updater = open_updater(algorithm, backend, reference, critic, objective=objective, learner=learner)
    lengths = [[12] * size * (1 + objective.is_of_pairs) for size in sizes]
    given = [sequences(one, seed=len(one)) for one in lengths]
    if algorithm.distillation.candidates:
        given = [list(map(with_candidates, one)) for one in given]
    done = [updater.update(updater.pack(one), step) for step, one in enumerate(given)]
    return [
        {
            "loss": update.loss,
            "grad_norm": update.grad_norm,
            **update.algorithm,
            **{f"{name}_{lag}": value for lag, figures in update.by_lag.items() for name, value in figures.items()},
        }
        for update in done
    ]


def with_candidates(sequence: PackableSequence) -> PackableSequence:
    length = len(sequence.loss_mask)
    tokens = (np.arange(length)[:, None] + np.arange(CANDIDATES)).astype(np.int32) % VOCABULARY
    logprobs = np.tile(np.array([-1, -1.5, -2], np.float32), (length, 1))
    return replace(sequence, candidates=Candidates(tokens, logprobs))


def critic_of(backend_kind: str) -> Critic:
    values = open_backend(backend_kind, MODEL, OPTIMIZER, seed=5, head="value")
    return Critic(values, Ranks.of(values), clip=0.2, gamma=0.99, lam=0.95, learning_rate=1e-2)


if __name__ == "__main__":
    results = {"fsdp": all_updates(), "megatron": other_updates("megatron")}
    Path(sys.argv[1], f"updates_{dist.get_rank()}.json").write_bytes(msgspec.json.encode(results))
    dist.destroy_process_group()
