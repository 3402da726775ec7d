"""A killed run goes on under other settings: those that may always change, and those that need all samples anew."""

import signal
from pathlib import Path

import pytest

from .recipes import write_recipe
from .records import Line, lineage, lines
from .terminals import Terminal, Terminals
from .watching import watching

pytestmark = pytest.mark.slow

RUN = "changed"
CHANGED = (
    "learner.steps=12",
    "learner.group_size=3",
    "learner.micro_batch_tokens=256",
    "learner.prefix_sharing=never",
    "learner.updates_per_step=2",
    "learner.compute.recompute=full",
    "optimizer.learning_rate=1e-3",
    "optimizer.beta1=0.8",
    "algorithm.preset=gspo",
    "algorithm.kl.coefficient=0.01",
    "staleness.max_lag=1",
    "staleness.on_over_bound=drop",
    "staleness.on_straggler=trim",
    "sampling.max_new_tokens=20",
    "engine.max_concurrent=4",
    "workers.segment_tokens=4",
    "broker.payload_shards=2",
    "checkpoint.every_steps=4",
    "checkpoint.keep=3",
    "weights.delta_chain=0",
    "weights.bucket_bytes=4096",
    "evaluation.prompts=2",
    "rewards[0].weight=2",
    "prompts.epochs=0",
)


def test_settings_that_may_change(terminals: Terminals, url: str) -> None:
    recipe = write_recipe(terminals.directory("learner"), learner={"steps": 30}, checkpoint={"every_steps": 3})
    workers = open_workers(terminals, url)
    with watching(url, RUN, terminals) as watch:
        first = open_learner(terminals, url, recipe)
        watch.until_step(5)
        watch.until_durable(run_directory(terminals) / "checkpoints" / "1" / "step_3")
        first.send(signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL
        refused = open_learner(terminals, url, recipe, "--resume", "learner.groups_per_step=2", *CHANGED)
        assert refused.wait() == 1
        assert "learner.groups_per_step was 4 and is 2 now: batches and admission numbers" in refused.said
        terminals.expect_failure(refused)
        second = open_learner(terminals, url, recipe, "--resume", *CHANGED)
        watch.until("it has ended", lambda status: status.state == "finished")
    second.succeeds()
    workers.succeeds()
    check(terminals, steps=12)
    assert {len(line["tids"]) for line in trained(terminals)[:3]} == {16}
    assert len(trained(terminals)[-1]["tids"]) <= 12  # trimmed, perhaps
    assert "not trained but generated anew" not in second.said

    anew = ("--rewind-to", "8", "--regenerate", "learner.groups_per_step=2", "sampling.temperature=0.8")
    third = open_learner(terminals, url, recipe, "--resume", *CHANGED[1:], "learner.steps=16", *anew)
    open_workers(terminals, url).succeeds()
    third.succeeds()
    check(terminals, steps=16)
    assert [groups_of(line) for line in trained(terminals)] == 8 * [4] + 8 * [2]


def open_workers(terminals: Terminals, url: str) -> Terminal:
    return terminals.open("workers", "workers", "--count", "2", "--broker", url, "--run", RUN)


def open_learner(terminals: Terminals, url: str, recipe: Path, *arguments: str) -> Terminal:
    return terminals.open("learner", "learner", recipe, "--broker", url, "--run", RUN, *arguments)


def run_directory(terminals: Terminals) -> Path:
    return terminals.root / "learner" / "runs" / RUN


def trained(terminals: Terminals) -> list[Line]:
    return lineage(run_directory(terminals) / "trained.jsonl")


def groups_of(line: Line) -> int:
    return len({tid.partition(":")[0] for tid in line["tids"]})


def check(terminals: Terminals, *, steps: int) -> None:
    """Assert that every step was trained, no trajectory twice in the lineage, none above the bound of its time."""
    found = trained(terminals)
    assert [line["step"] for line in found] == list(range(steps))
    tids = [tid for line in found for tid in line["tids"]]
    assert len(set(tids)) == len(tids)
    everything = lines(run_directory(terminals) / "trained.jsonl")
    assert max(line["step"] - line["oldest_step"] for line in everything) <= 2
