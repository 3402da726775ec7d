"""The comparison of an agent that learns with one that does not."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import agents
from benchmarks.agents import Cores, main, role_of


def test_parts_that_have_ended_are_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[tuple[str, list[str]]] = []

    def trained(recipe: str, overrides: list[str], directory: Path, name: str, timeout_s: float) -> dict[str, Any]:
        made.append((name, overrides))
        if name == "control" and len(made) == 2:
            raise KeyboardInterrupt
        return {"eval_after": 0.5}

    monkeypatch.setattr(agents, "trained", trained)
    monkeypatch.setattr(agents, "warmed_up", lambda *_: ["model.path=warm"])
    monkeypatch.setattr(sys, "argv", ["agents", "agent-arithmetic.yaml", "--output", str(tmp_path), "learner.steps=2"])
    with pytest.raises(KeyboardInterrupt):
        main()
    assert main() == 0
    own = ["learner.steps=2", "model.path=warm"]
    control = ("control", [*own, f"optimizer.learning_rate={5.0e-4 / 1000}"])
    assert made == [("learning", own), control, control]
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said == {"recipe": "agent-arithmetic.yaml", "learning": {"eval_after": 0.5}, "control": {"eval_after": 0.5}}


def test_processes_count_towards_their_role() -> None:
    assert role_of(["python", "-m", "headway", "--debug", "worker", "--name", "worker-0"]) == "worker"
    assert role_of(["python", "-m", "headway", "run", "recipe.yaml"]) == "run"
    assert role_of(["python", "-m", "headway.broker.user_code.host"]) == "hosts of user code"
    assert role_of(["VLLM::EngineCore"]) == "vllm"
    assert role_of(["/bin/valkey-server", "unixsocket:/s"]) == "valkey-server"
    cores = Cores()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        while "python" not in "".join(cores.of_roles()) or max(cores.of_roles().values()) == 0.0:
            cores.look()
            time.sleep(0.1)
        busy.kill()
    assert max(cores.of_roles().values()) > 0.0
