"""Supervised training, then direct preference optimization, from one recipe and from any kill."""

import json
import signal
import time
from pathlib import Path

import pytest

from .recipes import write_recipe
from .terminals import DEADLINE_S, Terminal, Terminals

pytestmark = pytest.mark.slow

ONE = {"min_operations": 1, "max_operations": 1}
CARELESS = {"error_rate": 0.4, "skip_rate": 0.5}
STAGES = [
    {
        "kind": "sft",
        "phases": [
            {"kind": "arithmetic", "options": ONE, "learning_rate": 1e-2, "batch_size": 32, "max_steps": 150},
            {"kind": "arithmetic", "options": {**ONE, **CARELESS}, "learning_rate": 2e-3, "max_steps": 30},
        ],
    },
    {
        "kind": "dpo",
        "options": {
            "data": {"path": "pairs.jsonl"},
            "held_out_records": 32,
            "learning_rate": 2e-3,
            "max_steps": 60,
            "epochs": 9,
            "evaluate_every_steps": 10,
            "keep": "best",
        },
    },
]


def test_preferences_raise_the_pass_rate_and_a_killed_stage_leaves_the_same_model(terminals: Terminals) -> None:
    whole, killed = [terminals.directory(name) for name in ("whole", "killed")]
    recipes = [_recipe(directory) for directory in (whole, killed)]
    terminals.open("whole", "run", recipes[0]).succeeds()
    warm, tuned = whole / "runs" / "tiny" / "sft", whole / "runs" / "tiny" / "stages" / "2-dpo"
    rates = [json.loads(path.read_text())["pass_rate"] for path in (warm / "sft.json", tuned / "stage.json")]
    assert rates[1] >= rates[0] + 0.3, rates

    run = killed / "runs" / "tiny"
    first = terminals.open("killed", "run", recipes[1])
    record = run / "stages" / "2-dpo.metrics.jsonl"
    _until_lines(first, record, 25)
    first.send(signal.SIGKILL)
    first.wait()
    assert not (run / "stages" / "2-dpo").exists()
    terminals.open("killed", "run", recipes[1], "--resume").succeeds()
    model = "model.safetensors"
    assert (run / "stages" / "2-dpo" / model).read_bytes() == (tuned / model).read_bytes()
    steps = [json.loads(line) for line in record.read_text().splitlines()]
    assert [line["steps"] for line in steps] == list(range(1, 61))
    assert steps == [json.loads(line) for line in tuned.with_name("2-dpo.metrics.jsonl").read_text().splitlines()]


def _recipe(directory: Path) -> Path:
    """With pairs of right chains and wrong ones, as TRL's files have them."""
    pairs = []
    for number in range(600):
        first, operator, second = number % 10, "+-*"[number // 10 % 3], number // 30 % 10
        right = {"+": first + second, "-": first - second, "*": first * second}[operator] % 10
        wrong = (right + 1 + number % 9) % 10
        answers = [f"{first}{operator}{second}={answer}#{answer}" for answer in (right, wrong)]
        pairs.append({"prompt": f"^{first}{operator}{second}=", "chosen": answers[0], "rejected": answers[1]})
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    return write_recipe(
        directory,
        stages=STAGES,
        prompts={"kind": "arithmetic", "options": ONE},
        rewards=[{"kind": "arithmetic"}],
        evaluation={"prompts": 64},
    )


def _until_lines(terminal: Terminal, path: Path, count: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert terminal.exit_code() is None, terminal.tail()
        assert time.monotonic() < deadline, terminal.tail()
        time.sleep(0.05)
