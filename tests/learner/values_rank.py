"""One rank of critics and reward models under several layouts, run by torchrun: it writes the values of each.

python -m torch.distributed.run --nproc-per-node 2 -m tests.learner.values_rank DIRECTORY MODEL LAYOUTS
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from headway.learner.backends import open_backend
from headway.learner.backends.base import TokenLoss, ValueBackend
from headway.learner.batching.batch import PackedBatch
from headway.learner.batching.packing import pack
from headway.learner.config import LayoutConfig, ModelConfig, OptimizerConfig
from tests.learner.tiny import sequences

LENGTHS = [20, 6, 7, 19, 11, 3, 25, 14]
BUDGET = 40
LEARNING_RATE = 1e-3
STEPS = 2
OPTIMIZER = OptimizerConfig(weight_decay=0.1, max_grad_norm=0.5, epsilon=1e-6)


class Story(msgspec.Struct, kw_only=True):
    """The results of one model on one rank."""

    losses: list[float] = []
    norms: list[float] = []
    values: list[list[float]] = []
    """The sum of each sequence's values, at the start and after each step; 0 for those of other replicas."""
    is_lead: bool = True
    moved: list[str] = []
    """The models whose opening changed the state of the process's generator, among those opened so far."""


def told(backend: ValueBackend, steps: range) -> Story:
    """Train so many steps on regression targets, and return the results."""
    story = Story(values=[_values(backend)], is_lead=backend.is_lead)
    for number in steps:
        batches = batches_of(backend, number)
        loss, norm, _ = backend.step(batches, _regression(batches), LEARNING_RATE)
        story.losses.append(loss)
        story.norms.append(norm)
        story.values.append(_values(backend))
    return story


def batches_of(backend: ValueBackend, number: int) -> list[PackedBatch]:
    return pack(sequences(LENGTHS, seed=number), backend.replica, backend.replicas, BUDGET)


def _regression(batches: list[PackedBatch]) -> TokenLoss:
    """Return the squared distance of trained values to the advantages, summed over the batch and divided by 50."""

    def loss(index: int, values_T: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        batch = batches[index]
        return ((values_T - batch.advantages_T) ** 2 * batch.loss_mask_T).sum() / 50, {"tokens": 1.0}

    return loss


def _values(backend: ValueBackend) -> list[float]:
    given = sequences(LENGTHS, seed=0)
    sums = [0.0] * len(given)
    batches = batches_of(backend, 0)
    for batch, values_T in zip(batches, backend.values(batches), strict=True):
        for tokens_L, values_L in zip(
            batch.token_ids_T.split(batch.cu_seqlens.diff().tolist()),
            values_T.split(batch.cu_seqlens.diff().tolist()),
            strict=True,
        ):
            place = next(n for n, one in enumerate(given) if one.token_ids.tolist() == tokens_L.tolist())
            sums[place] = float(values_L.sum())
    return sums


def run(directory: Path, model: ModelConfig, layouts: list[LayoutConfig]) -> dict[str, Story]:
    """Run every layout. Each one's critic also resumes the checkpoint that the layout before it saved after a step."""
    stories: dict[str, Story] = {}
    moved: list[str] = []
    for number, layout in enumerate(layouts):
        options: dict[str, Any] = {"seed": 5, "layout": layout}
        with _watched(moved, f"critic {number}"):
            critic = open_backend("megatron", model, OPTIMIZER, head="value", **options)
        first = told(critic, range(1))
        critic.save(directory / f"critic_{number}")
        rest = told(critic, range(1, STEPS))
        stories[f"critic {number}"] = _joined(first, rest)
        critic.load(directory / f"critic_{max(number - 1, 0)}")
        with critic.off_device():
            pass
        stories[f"resumed {number}"] = _joined(first, told(critic, range(1, STEPS)))
        with _watched(moved, f"scores {number}"):
            scores = open_backend("megatron", model, OPTIMIZER, head="score", **options)
        stories[f"scores {number}"] = told(scores, range(STEPS))
        stories[f"scores {number}"].moved = list(moved)
        scores.save(directory / f"scores_{number}")
    return stories


@contextmanager
def _watched(moved: list[str], what: str) -> Iterator[None]:
    before = torch.get_rng_state()
    yield
    if not torch.equal(before, torch.get_rng_state()):
        moved.append(what)


def _joined(first: Story, rest: Story) -> Story:
    return Story(
        losses=first.losses + rest.losses,
        norms=first.norms + rest.norms,
        values=first.values + rest.values[1:],
        is_lead=first.is_lead,
    )


def main(directory: Path, model: str, layouts: str) -> None:
    torch.set_num_threads(1)
    chosen = msgspec.json.decode(layouts, type=list[LayoutConfig])
    stories = run(directory, ModelConfig(path=model, dtype="float32"), chosen)
    (directory / f"rank_{dist.get_rank()}.json").write_bytes(msgspec.json.encode(stories))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
