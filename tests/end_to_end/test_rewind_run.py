"""A learner goes back: it trains the logged batches again to the last bit, or has workers generate them anew."""

import shutil
import signal
from pathlib import Path

import pytest

from headway.broker.schema import WeightVersion
from headway.broker.server.embedded import EmbeddedServer

from .fixed_batches import (
    GROUPS,
    SAMPLES,
    STEPS,
    checkpoint_at,
    final_checkpoint,
    run_directory,
    scripted_worker,
    start_learner,
)
from .records import Line, lines
from .terminals import Terminals

pytestmark = pytest.mark.slow

BACK, REACHED = 3, 5


def first_learner(terminals: Terminals, url: str) -> list[Line]:
    """Run a learner to its end at REACHED, with a checkpoint at BACK, and return the lines that it trained."""
    with scripted_worker(url, terminals) as worker:
        learner = start_learner(terminals, url, f"learner.steps={REACHED}")
        worker.answer(range(REACHED))
        learner.succeeds()
    return lines(run_directory(terminals) / "trained.jsonl")


def groups(trained: list[Line]) -> list[str]:
    return sorted({tid.partition(":")[0] for line in trained for tid in line["tids"]})


def test_a_rewound_learner_ends_with_the_same_bits(terminals: Terminals, url: str, uninterrupted: Path) -> None:
    before = first_learner(terminals, url)
    with scripted_worker(url, terminals) as worker:
        learner = start_learner(terminals, url, "--resume", "--rewind-to", f"{BACK}")
        worker.answer(range(REACHED, STEPS))
        learner.succeeds()
        assert all(version.step >= REACHED for version in worker.watch.announced)
    trained = lines(run_directory(terminals) / "trained.jsonl")[len(before) :]
    assert [(line["incarnation"], line["step"]) for line in trained] == [(2, step) for step in range(BACK, STEPS)]
    assert [line["tids"] for line in trained[: REACHED - BACK]] == [line["tids"] for line in before[BACK:]]
    rewound = final_checkpoint(terminals, incarnation=2)
    for name in ("model.safetensors", "rng/rank_0.msgpack"):
        assert (rewound / name).read_bytes() == (uninterrupted / name).read_bytes()


def test_a_learner_that_lost_its_server_too_ends_with_the_same_bits(
    terminals: Terminals, server: EmbeddedServer, tmp_path: Path, uninterrupted: Path
) -> None:
    with scripted_worker(server.url, terminals) as worker:
        first = start_learner(terminals, server.url)
        worker.answer(range(REACHED))
        worker.watch.until_step(REACHED)
        worker.watch.until_durable(checkpoint_at(terminals, incarnation=1, step=BACK))
        first.send(signal.SIGKILL)
        first.wait()
    server.stop()
    shutil.rmtree(tmp_path / "server" / "appendonlydir")
    server.start()
    with scripted_worker(server.url, terminals) as worker:
        second = start_learner(terminals, server.url, "--resume")
        worker.answer(range(REACHED, STEPS))
        second.succeeds()
    trained = lines(run_directory(terminals) / "trained.jsonl")
    again = [line["tids"] for line in trained if line["incarnation"] == 2 and line["step"] < REACHED]
    assert again == [line["tids"] for line in trained if line["incarnation"] == 1][BACK:]
    model = "model.safetensors"
    assert (final_checkpoint(terminals, 2) / model).read_bytes() == (uninterrupted / model).read_bytes()


def test_what_the_checkpoint_lacks_is_generated_anew(terminals: Terminals, url: str) -> None:
    before = first_learner(terminals, url)
    steps = range(BACK, BACK + 3)  # weights that both branches share may have sampled these
    with scripted_worker(url, terminals) as worker:
        arguments = ("--resume", "--rewind-to", f"{BACK}", "--regenerate", f"learner.steps={steps.stop}")
        learner = start_learner(terminals, url, *arguments)
        # Until then the run is the one that has ended, which still leases samples of its groups.
        worker.watch.until("it has gone back", lambda status: status.announced == WeightVersion(2, BACK))
        worker.answer(steps)
        learner.succeeds()
        assert worker.watch.until_step(steps.stop).announced == WeightVersion(2, steps.stop)
    trained = lines(run_directory(terminals) / "trained.jsonl")[len(before) :]
    assert [(line["incarnation"], line["step"]) for line in trained] == [(2, step) for step in steps]
    contained = groups(before[:BACK])
    assert groups(trained) == [f"0000-{place:08d}" for place in range(len(contained), GROUPS * steps.stop)]
    assert {len(line["tids"]) for line in trained} == {GROUPS * SAMPLES}


def test_there_must_be_a_checkpoint_there(terminals: Terminals, url: str) -> None:
    refused = start_learner(terminals, url, "--resume", "--rewind-to", "1")
    assert refused.wait() == 1
    assert "There is no checkpoint at step 1 to rewind to: there is none." in refused.said
