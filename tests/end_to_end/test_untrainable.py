"""A batch that passes all checks and cannot be trained: the error names a remedy, and the remedy works."""

import pytest

from .fixed_batches import GROUPS, checkpoint_at, run_directory, scripted_worker, start_learner
from .records import lines
from .terminals import Terminals

pytestmark = pytest.mark.slow

SAVED, LAST = 3, 6
POISON = 13.0
"""A reward that the recipe's own advantage cannot take."""


def test_the_way_out_of_a_batch_that_cannot_be_trained(terminals: Terminals, url: str) -> None:
    steps = f"learner.steps={LAST}"
    with scripted_worker(url, terminals) as worker:
        learner = start_learner(terminals, url, steps)
        worker.answer(range(SAVED + 1))
        worker.watch.until_durable(checkpoint_at(terminals, incarnation=1, step=SAVED))
        terminals.expect_failure(learner)
        worker.answer_groups(SAVED + 1, GROUPS, reward=POISON)
        assert learner.wait() == 1

        again = start_learner(terminals, url, steps, "--resume")
        terminals.expect_failure(again)
        assert again.wait() == 1  # the batch is pinned
    said = " ".join(again.said.split())
    assert said.count(f"Step {SAVED + 2} failed while it was trained (IndexError: index 13 is out of range).") == 2
    assert f"go on without the batch: --resume --rewind-to {SAVED} --regenerate" in said
    assert "bug in Headway" not in said

    with scripted_worker(url, terminals) as worker:
        way_out = start_learner(terminals, url, steps, "--resume", "--rewind-to", f"{SAVED}", "--regenerate")
        worker.answer(range(SAVED, LAST))
        way_out.succeeds()
    trained = {line["step"]: line["incarnation"] for line in lines(run_directory(terminals) / "trained.jsonl")}
    assert sorted(trained) == [*range(LAST)]
    assert trained[SAVED + 1] == 3
