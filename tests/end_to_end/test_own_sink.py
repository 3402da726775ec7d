"""A user's own metric sink, from outside of the repository, gets the same events as the run's own record."""

import json

import pytest

from tests.deploy.sinks.curves import curve

from .recipes import SEVENS, write_recipe
from .records import lines, summary
from .terminals import Terminals

pytestmark = pytest.mark.slow

SINKS = """
import json
import time


class Notes:
    is_record = False
    wants_heartbeats = True

    def __init__(self, name):
        self.name = name

    def open(self, run):
        assert len(run.identity) == 16
        self.path = run.directory / self.name

    def write(self, event):
        note = {"event": type(event).__name__, "step": getattr(event, "metrics", event).step}
        if hasattr(event, "workers"):
            note["workers"] = [worker.worker for worker in event.workers]
        else:
            note["reward"] = event.metrics.reward_mean
        with self.path.open("a") as file:
            file.write(json.dumps(note) + "\\n")

    def close(self):
        self.path.with_suffix(".closed").touch()


class Hangs(Notes):
    def write(self, event):
        time.sleep(600)


class Raises(Notes):
    def write(self, event):
        raise ValueError(self.name)
"""


def test_a_run_tells_ones_own_sinks_and_outlives_them(terminals: Terminals) -> None:
    home = terminals.directory("run")
    (home / "sevens.py").write_text(SEVENS)
    (home / "my_sinks.py").write_text(SINKS)
    own = [{"kind": f"my_sinks:{name}", "options": {"name": f"{name}.jsonl"}} for name in ("Notes", "Hangs", "Raises")]
    recipe = write_recipe(home, metrics=[{"kind": "jsonl"}, *own, {"kind": "tensorboard"}], workers={"count": 1})
    terminals.open("run", "run", recipe).succeeds()
    run = terminals.root / "run" / "runs" / "tiny"
    told, recorded = lines(run / "Notes.jsonl"), lines(run / "metrics.jsonl")
    steps = [note for note in told if note["event"] == "StepEvent"]
    assert [(note["step"], note["reward"]) for note in steps] == [
        (line["step"], line["reward_mean"]) for line in recorded
    ]
    first = next(note for note in told if note["event"] == "HeartbeatEvent" and note["workers"])
    assert (first["step"], len(first["workers"])) == (0, 1)
    assert (run / "Notes.closed").exists()
    assert summary(run)["steps"] == len(recorded) == 4
    assert summary(run)["trained_tokens"] == sum(line["trained_tokens"] for line in recorded)
    log = (run / "logs" / "learner.log").read_text()
    assert log.count("writing raised ValueError: Raises.jsonl") == 1
    assert "metrics[2] (my_sinks:Hangs): this sink has not ended" in log
    assert f"metrics[3] (my_sinks:Raises): this sink has lost {len(told)} events" in log
    points = curve(run / "tensorboard", "step/reward_mean")
    assert points == pytest.approx({line["step"]: line["reward_mean"] for line in recorded}, rel=1e-6)
    assert json.loads((run / "settings.json").read_text())["metrics"][3]["kind"] == "my_sinks:Raises"
