"""A step of every preset with tokens that samples share computed once, and with separate rows. Alone, on one rank:

python -m torch.distributed.run --nproc-per-node 1 -m tests.learner.preset_sharing BACKEND
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from headway.algorithms.presets import PRESETS
from headway.broker.schema import Group
from headway.learner.batching.clusters import PrefixSharing
from headway.learner.objective.composition import needs_reference
from tests.learner import test_presets
from tests.learner.batches import group
from tests.learner.tiny import OPTIMIZER

CLOSE = 1e-6
"""The largest difference of a gradient, in parts of its norm. With fp32 it was below 6.3e-7 for every preset and both
backends."""
SEED = 4
"""The weights that all steps begin with. Of 13 seeds, 3 gave more than 9e-7 for `sequence_tis`, up to 1.1e-6."""
STEADY = msgspec.structs.replace(OPTIMIZER, epsilon=1e-6)
"""With an epsilon of 1e-8 AdamW's first step divides gradients near 1e-8 by themselves, so their rounding moved a
weight by up to 2e-4. With this one it moved none by more than 1.4e-6."""


class Step(NamedTuple):
    """The outcome of one training step."""

    loss: float
    grad_norm: float
    algorithm: dict[str, float]
    gradients: list[torch.Tensor]
    """[P] of each model that was trained."""
    weights: torch.Tensor


def compare(preset: str, kind: str, **others: object) -> None:
    """Compare loss, gradients and weights of a whole step, with what goes before it: logprobs of all policies, a
    critic, pairs."""
    separate, shared = (taken(preset, kind, sharing, **others) for sharing in ("never", "always"))
    assert shared.loss == pytest.approx(separate.loss, abs=CLOSE, rel=CLOSE)
    assert shared.grad_norm == pytest.approx(separate.grad_norm, rel=CLOSE)
    assert shared.algorithm.keys() == separate.algorithm.keys()
    assert separate.gradients
    for wanted, found in zip(separate.gradients, shared.gradients, strict=True):
        assert wanted.norm() > 0
        assert (found - wanted).norm() <= CLOSE * wanted.norm()
    torch.testing.assert_close(shared.weights, separate.weights, rtol=0, atol=5e-6)


def taken(preset: str, kind: str, prefix_sharing: PrefixSharing, **others: object) -> Step:
    config = test_presets.configured(preset, **others)
    with mock.patch.object(test_presets, "group", alike_group), recorded_gradients() as gradients:
        updater, backend = test_presets.build(
            config,
            kind=kind,
            has_reference=needs_reference(config),
            prefix_sharing=prefix_sharing,
            seed=SEED,
            optimizer=STEADY,
        )
        judged = updater.compute_advantages(test_presets.sampled(backend, range(4)), 0)
        packed = updater.pack(judged.sequences)
        has_tree = any(batch.tree is not None for part in packed for batch in part)
        assert has_tree is (prefix_sharing == "always")
        update = updater.update(packed, 0)
    return Step(update.loss, update.grad_norm, update.algorithm, gradients, test_presets.weights(backend))


def alike_group(number: int) -> Group:
    """Return a group of which all responses begin with the same two tokens."""
    one, trajectories = group(number), []
    for trajectory in one.trajectories:
        tokens = trajectory.response_tokens.copy()
        tokens[:2] = (5, 6)
        trajectories.append(msgspec.structs.replace(trajectory, response_tokens=tokens))
    return msgspec.structs.replace(one, trajectories=tuple(trajectories))


@contextmanager
def recorded_gradients() -> Iterator[list[torch.Tensor]]:
    """Record the gradients with which each optimizer makes its step."""
    found: list[torch.Tensor] = []
    real = torch.optim.AdamW.step

    def step(optimizer: torch.optim.AdamW, *args: Any, **kwargs: Any) -> Any:
        found.append(_flat([p.grad for group in optimizer.param_groups for p in group["params"]]))
        return real(optimizer, *args, **kwargs)

    with mock.patch.object(torch.optim.AdamW, "step", step):
        yield found


def _flat(gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
    whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in gradients if one is not None]
    return torch.cat([one.detach().flatten().clone() for one in whole])


if __name__ == "__main__":
    for name in PRESETS:
        compare(name, sys.argv[1])
    compare("grpo", sys.argv[1], entropy_coefficient=0.5)
    dist.destroy_process_group()
