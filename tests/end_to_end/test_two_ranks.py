"""A learner of two processes under torchrun learns as well as one, and its checkpoint is a model like any other."""

from pathlib import Path

import pytest
import torch

from .fixed_batches import STEPS, final_checkpoint, scripted_worker, start_learner, training_state
from .terminals import Terminals

pytestmark = pytest.mark.slow


def test_two_ranks_end_where_one_does(terminals: Terminals, url: str, uninterrupted: Path) -> None:
    with scripted_worker(url, terminals) as worker:
        learner = start_learner(terminals, url, "--processes", "2")
        worker.answer(range(STEPS))
        learner.succeeds()
    checkpoint = final_checkpoint(terminals, incarnation=1)
    expected, found = training_state(uninterrupted), training_state(checkpoint)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=0, atol=1e-5), name
    assert sorted(path.name for path in (checkpoint / "rng").iterdir()) == ["rank_0.msgpack", "rank_1.msgpack"]
