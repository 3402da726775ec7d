"""A run is replayed offline from its log: the same settings give the same bits, another loss gives another outcome."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from .recipes import write_recipe
from .records import Line, lines
from .terminals import Terminal, Terminals

pytestmark = pytest.mark.slow

STEPS = 6


@pytest.fixture(scope="module")
def terminals(tmp_path_factory: pytest.TempPathFactory, machine: dict[str, str]) -> Iterator[Terminals]:
    """Yield one set of terminals for all tests of this file, which replay the same run."""
    opened = Terminals(tmp_path_factory.mktemp("replay"), machine)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def run(terminals: Terminals) -> Path:
    """Return a finished run whose broker is gone."""
    recipe = write_recipe(
        terminals.directory("run"), learner={"steps": STEPS}, checkpoint={"every_steps": 3}, workers={"count": 1}
    )
    terminals.open("run", "run", recipe).succeeds()
    return terminals.root / "run" / "runs" / "tiny"


def report(terminal: Terminal) -> Line:
    """Return the JSON object at the end of the output."""
    said = terminal.said
    found: Line = json.loads(said[said.index("\n{\n") :])
    return found


def test_the_same_settings_give_the_same_bits(run: Path, terminals: Terminals) -> None:
    replaying = terminals.open("run", "replay", "tiny")
    replaying.succeeds()
    assert f"Loss and gradient norm of all {STEPS} steps equal the original's, bit for bit." in replaying.said
    for step in (3, STEPS):
        assert f"The weights at step {step} equal those of runs/tiny/checkpoints/1/step_{step}" in replaying.said
    replayed = run / "replays" / "grpo"
    trained, again = lines(run / "metrics.jsonl"), lines(replayed / "metrics.jsonl")
    assert [(step["loss"], step["grad_norm"]) for step in trained] == [(s["loss"], s["grad_norm"]) for s in again]
    model = "model.safetensors"
    final = run / "checkpoints" / "1" / f"step_{STEPS}"
    assert (replayed / "model" / model).read_bytes() == (final / model).read_bytes()


def test_another_loss_gives_other_weights_and_says_so(run: Path, terminals: Terminals) -> None:
    replaying = terminals.open("run", "replay", str(run), "--algorithm", "gspo", "--from", "3", "--json")
    replaying.succeeds()
    found = report(replaying)
    assert "algorithm.objective.kind" in found["changed"]
    assert (found["is_identical"], found["first_difference"]) == (False, 3)
    assert [step["step"] for step in found["steps"]] == [3, 4, 5]
    assert [step["replayed"]["reward_mean"] for step in found["steps"]] == [
        step["original"]["reward_mean"] for step in found["steps"]
    ]
    assert [(weights["step"], weights["is_equal"]) for weights in found["weights"]] == [(STEPS, False)]
    assert (run / "replays" / "gspo" / "summary.json").exists()


def test_a_replay_that_is_not_the_run_is_a_failure(run: Path, terminals: Terminals) -> None:
    """A replay may differ for any reason; in this test one figure of the run is another."""
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"grad_norm":', '"grad_norm":1', 1))
    replaying = terminals.open("run", "replay", "tiny", "--steps", "1")
    assert replaying.wait() == 1
    assert "differ from the original's from step 0 on" in replaying.said
