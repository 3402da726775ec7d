"""Supervised training, then direct preference optimization: the shipped recipe, on pairs of a file, and a kill."""

import json
import shutil
import signal
import time
from pathlib import Path

import pytest

from learner.data.sources import arithmetic_pairs

from .terminals import DEADLINE_S, Terminal, Terminals

pytestmark = pytest.mark.slow

PAIRS = "stages.dpo.options.data={path: pairs.jsonl}"
STEPS = 60


def test_preferences_raise_the_pass_rate_and_a_killed_stage_leaves_the_same_model(terminals: Terminals) -> None:
    """The warm-up, which takes nearly all of the time, is trained once."""
    whole, killed = [terminals.directory(name) for name in ("whole", "killed")]
    _write_pairs(whole / "pairs.jsonl")
    terminals.open("whole", "run", "dpo.yaml", PAIRS, "--until", "sft").succeeds()
    shutil.copytree(whole, killed, dirs_exist_ok=True)
    terminals.open("whole", "run", "dpo.yaml", PAIRS, "--from", "dpo").succeeds()
    warm, tuned = whole / "runs" / "dpo" / "sft", whole / "runs" / "dpo" / "stages" / "2-dpo"
    rates = [json.loads(path.read_text())["pass_rate"] for path in (warm / "sft.json", tuned / "stage.json")]
    assert rates[1] >= rates[0] + 0.3, rates

    first = terminals.open("killed", "run", "dpo.yaml", PAIRS, "--resume")
    again = killed / "runs" / "dpo" / "stages" / "2-dpo"
    record = again.with_name("2-dpo.metrics.jsonl")
    _until_lines(first, record, 25)
    first.send(signal.SIGKILL)
    first.wait()
    assert not again.exists()
    terminals.open("killed", "run", "dpo.yaml", PAIRS, "--resume").succeeds()
    model = "model.safetensors"
    assert (again / model).read_bytes() == (tuned / model).read_bytes()
    steps = [json.loads(line) for line in record.read_text().splitlines()]
    assert [line["steps"] for line in steps] == list(range(1, STEPS + 1))
    assert steps == [json.loads(line) for line in tuned.with_name(record.name).read_text().splitlines()]
    assert steps[-1]["metrics"]["held_out/reward_accuracy"] > 0.9


def _write_pairs(path: Path) -> None:
    """Right chains and careless ones, of no held-out prompt, as TRL's files have them."""
    pairs = arithmetic_pairs({"records": 4096}, seed=1, where="pairs")
    rows = [{"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected} for pair in pairs]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def _until_lines(terminal: Terminal, path: Path, count: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert terminal.exit_code() is None, terminal.tail()
        assert time.monotonic() < deadline, terminal.tail()
        time.sleep(0.05)
