"""The dashboard and the alerting rules query only metrics that the roles serve."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from headway.broker.schema import WeightVersion
from headway.broker.schema.status import Tallies, VersionGroups
from headway.broker.schema.step_metrics import LagFigures
from headway.deploy.observe.prometheus.exposition import MetricsEndpoint
from headway.deploy.observe.prometheus.learner_metrics import RunCollector
from headway.deploy.observe.prometheus.worker_metrics import WorkerCollector
from headway.deploy.run.events import HeartbeatEvent

from .runs import POOL, SCORER, SCORING, evaluation, run_status, step_event, step_metrics
from .sinks.scrapes import Sample, scrape
from .test_worker_metrics import Stub

CASES = Path(__file__).parent / "alert_cases.yaml"
OF_PROMETHEUS = {"up"}
OF_TARGETS = {"instance", "job"}
SELECTOR = re.compile(r"\b(headway_\w+|process_\w+|up)\b(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)(=~|=)"([^"]*)"')


@pytest.fixture(scope="module")
def served() -> dict[Sample, float]:
    """Return the names of all metrics that a learner and a worker serve."""
    run = RunCollector()
    run.begin("arithmetic", "0123456789abcdef")
    step = step_event(0)
    by_lag = {
        1: LagFigures(trajectories=1, tokens=1, reward_mean=0, ratio_mean=1, ess=1, clip_fraction=0, mask_fraction=0)
    }
    step = replace(step, metrics=replace(step.metrics, algorithm={"ess": 0.9, "clip_fraction": 0.1}, by_lag=by_lag))
    tallies = Tallies(trained_by_prompt_length={8: 4}, dispatched_by_lag={0: 30}, resumed_by_lag={1: 9})
    ages = replace(run_status().ages, next_sample_s=1.0)
    held = (VersionGroups(0, generating=1, ready=1, dropped=0, ready_samples=2, ready_tokens=9),)
    status = replace(
        run_status(), tallies=tallies, ages=ages, versions=held, pools=(POOL,), scorers=(SCORER,), scoring=(SCORING,)
    )
    for event in (step, evaluation(1, 0, 0.5), HeartbeatEvent.of(status, step_metrics(0))):
        run.note(event)
    found: dict[Sample, float] = {}
    stub = Stub()
    stub.said = replace(stub.said, version=WeightVersion(1, 1))
    for collector in (run, WorkerCollector(stub)):
        with closing(MetricsEndpoint(collector, host="127.0.0.1", port=0)) as endpoint:
            found |= scrape(endpoint.url)
    return found


def printed(option: str) -> str:
    command = [sys.executable, "-m", "headway", "metrics", option]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def expressions(content: Any) -> Iterator[str]:
    """Yield every query in a file."""
    if isinstance(content, dict):
        yield from (value for key, value in content.items() if key in ("expr", "definition"))
        content = list(content.values())
    if isinstance(content, list):
        for below in content:
            yield from expressions(below)


def is_served(name: str, matchers: str, served: dict[Sample, float]) -> bool:
    wanted = [(label, kind, text) for label, kind, text in MATCHER.findall(matchers) if label not in OF_TARGETS]
    return name in OF_PROMETHEUS or any(
        of == name and all(_matches(dict(labels).get(label, ""), kind, text) for label, kind, text in wanted)
        for of, labels in served
    )


def _matches(value: str, kind: str, text: str) -> bool:
    return bool(re.fullmatch(text, value)) if kind == "=~" else value == text


@pytest.mark.parametrize("option", ["--grafana", "--alerts"])
def test_every_query_is_of_something_that_the_roles_serve(option: str, served: dict[Sample, float]) -> None:
    found = list(expressions(yaml.safe_load(printed(option))))
    assert len(found) >= 10
    for expression in found:
        selectors = SELECTOR.findall(expression)
        assert selectors, expression
        assert not [name for name, matchers in selectors if not is_served(name, matchers, served)], expression


def test_the_dashboard_is_json_whose_panels_lie_beside_each_other() -> None:
    panels = json.loads(printed("--grafana"))["panels"]
    places = [panel["gridPos"] for panel in panels]
    cells = [
        (x, y) for at in places for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells))
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_one_of_the_files_must_be_named() -> None:
    answer = subprocess.run([sys.executable, "-m", "headway", "metrics"], capture_output=True, text=True, check=False)
    assert (answer.returncode, "Give --grafana or --alerts." in answer.stderr) == (2, True)


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool, of Debian's package prometheus, is not installed"
)
def test_prometheus_takes_the_rules_and_they_fire_when_they_should(tmp_path: Path) -> None:
    rules = tmp_path / "alerts.yaml"
    rules.write_text(printed("--alerts"))
    for arguments in (["check", "rules", str(rules)], ["test", "rules", str(CASES)]):
        answer = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
        assert answer.returncode == 0, answer.stdout + answer.stderr
