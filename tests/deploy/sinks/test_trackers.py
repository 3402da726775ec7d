"""Weights & Biases, MLflow and trackio keep every point of a run offline, and a resumed run goes on in the same one."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.broker.errors import ConfigError
from headway.deploy.observe.sinks import open_sinks
from headway.deploy.observe.sinks.trackers import mlflow_name, points
from headway.deploy.recipe.recipe import SinkConfig
from headway.deploy.run.events import Event, HeartbeatEvent
from tests.deploy.runs import evaluation, run_status, sink_run, step_metrics

from .trackers import judged

ROOT = Path(__file__).parents[3]
TRACKERS = ("wandb", "mlflow", "trackio")


def tracker(what: str, kind: str, directory: Path) -> str:
    """Run the program that writes or reads, in a process of its own, because trackers keep state in their modules."""
    own = {"TRACKIO_DIR": str(directory / "trackio"), "HF_HUB_OFFLINE": "1"}
    answer = subprocess.run(
        [sys.executable, "-m", "tests.deploy.sinks.trackers", what, kind, str(directory)],
        cwd=ROOT,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRACKERS)
def test_a_tracker_keeps_every_point_offline_and_goes_on_after_a_resume(kind: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(kind) is None:
        pytest.skip(f"needs {kind}: make test-trackers")
    tracker("write", kind, tmp_path)
    found = json.loads(tracker("read", kind, tmp_path).splitlines()[-1])
    events: list[Event] = [
        judged(3, 2, 0.75),
        evaluation(2, 3, 0.25),
        HeartbeatEvent.of(run_status(), step_metrics(3)),
    ]
    named: Callable[[str], str] = mlflow_name if kind == "mlflow" else str
    expected = {named(tag): value for event in events for tag, value in points(event)}
    assert {named("reward/right/pass@1"), named("reward/right/..//x")} < expected.keys()
    assert {tag: curve["3"] for tag, curve in found.items()} == pytest.approx(expected)
    assert found["step/reward_mean"] == {"0": 0.0, "1": 0.25, "2": 0.5, "3": 0.75}
    assert found["evaluation/pass_rate"] == {"2": 0.25, "3": 0.25}


@pytest.mark.parametrize("kind", TRACKERS)
def test_a_tracker_that_is_not_installed_says_how_to_install_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, kind, None)
    words = rf"metrics\[1\]\.kind={kind} needs {kind}, which is not installed\. pip install 'headway\[{kind}\]'"
    with pytest.raises(ConfigError, match=words):
        open_sinks((SinkConfig(kind="jsonl"), SinkConfig(kind=kind)), sink_run(tmp_path))
