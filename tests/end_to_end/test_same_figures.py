"""A figure that several views of a run share is the same in all: its files, status, both roles' endpoints, the page.

The test holds one sample back as a worker that never finishes it, until the learner waits and all queues rest.
"""

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import yaml

from headway.broker import BlockingBroker
from headway.broker.schema.status import RunStatus
from headway.broker.server.access import Role, url_as
from headway.deploy.observe.prometheus.exposition import Family
from headway.deploy.observe.prometheus.learner_metrics import (
    AGES,
    BY_LAG,
    LAST_STEP,
    POOL_STATES,
    QUEUED,
    QUEUES,
    SUMS,
    TALLIES,
)
from headway.deploy.observe.prometheus.worker_metrics import FIGURES
from headway.deploy.observe.status_tables import RECENT_STEPS
from headway.deploy.run.run_directory import newest_endpoint
from tests.broker.topologies import free_port, wait_until
from tests.deploy.page.test_dashboard import get_json
from tests.deploy.sinks.curves import every_curve
from tests.deploy.sinks.scrapes import Sample, figure, scrape
from tests.deploy.test_dashboards import expressions, printed

from .prometheus_server import IS_INSTALLED, prometheus, without_variables
from .recipes import write_recipe
from .records import Line, lineage
from .terminals import Terminal, Terminals
from .watching import Watch, attached

pytestmark = pytest.mark.slow

GROUPS, SAMPLES, WORKERS = 4, 4, 2
BEGUN_STEPS = 6
MOST_TOKENS = 16
"""The recipe's sampling.max_new_tokens."""
HELD_S = 600.0
STILL_S = 1.0
OF_THE_MOMENT = {"silent_s", "tokens_per_s", "heard_s", "broker_calls", "broker_s"}
"""Figures of a worker that change while it rests."""


@dataclass
class Views:
    """One run at rest, as each view shows it."""

    steps: list[Line]
    evaluations: list[Line]
    status: dict[str, Any]
    learner: dict[Sample, float]
    workers: dict[str, dict[Sample, float]]
    page: dict[str, Any]
    live: dict[str, Any]
    tensorboard: dict[str, dict[int, float]]
    """Each curve's values by step."""
    answers: dict[str, list[Any]]
    """Answers of a Prometheus server to the queries of the dashboard and of the alerts; empty without a server."""


@pytest.fixture(scope="module")
def views(tmp_path_factory: pytest.TempPathFactory, machine: dict[str, str]) -> Iterator[Views]:
    """Yield all views of the same moment."""
    terminals = Terminals(tmp_path_factory.mktemp("figures"), machine)
    try:
        yield of_a_run(terminals)
    finally:
        terminals.close()


def of_a_run(terminals: Terminals) -> Views:
    ports = free_port(), free_port()
    recipe = write_recipe(
        terminals.directory("run"),
        learner={"steps": 10_000, "groups_per_step": GROUPS, "group_size": SAMPLES},
        workers={"count": WORKERS, "metrics_port": ports[1]},
        broker={"lease_ttl_s": HELD_S},
        evaluation={"prompts": 4},
        metrics=[{"kind": "jsonl"}, {"kind": "tensorboard"}, {"kind": "prometheus", "options": {"port": ports[0]}}],
    )
    headway, run = terminals.open("run", "run", recipe), terminals.root / "run" / "runs" / "tiny"
    with attached(terminals, headway, run) as watch:
        watch.until_step(BEGUN_STEPS)
        with straggling(run):
            at_rest(watch)
            return seen(terminals, run, *ports)


@contextmanager
def straggling(run: Path) -> Iterator[None]:
    """Hold one sample as a worker that never finishes it."""
    found = newest_endpoint(run.parent)
    blocking = BlockingBroker(url_as(Role.WORKER, found.url), found.run)
    leases = blocking.broker.leases

    def has_one() -> bool:
        manifest = blocking.call(blocking.broker.versions.announced())
        assert manifest is not None
        return bool(blocking.call(leases.lease("straggler", manifest.version, 1, HELD_S)).leases)

    try:
        wait_until(has_one)
        yield
    finally:
        blocking.close()


def at_rest(watch: Watch) -> None:
    """Wait until nothing has changed for a while but the straggler's lease."""
    before: list[Any] = [None, time.monotonic()]

    def is_still(status: RunStatus) -> bool:
        now = (status.queues, status.last_step, [(worker.version, worker.submitted) for worker in status.workers])
        if before[0] != now:
            before[:] = now, time.monotonic()
        idle = [worker.active for worker in status.workers] == [0] * WORKERS
        return idle and status.queues.leased == 1 and time.monotonic() - before[1] > STILL_S

    watch.until("the run rests", is_still)


def seen(terminals: Terminals, run: Path, learners_port: int, workers_port: int) -> Views:
    """Return all views as they are now; the learner looks at the queues every 10 s."""
    began, url = time.time(), f"http://127.0.0.1:{learners_port}/metrics"
    wait_until(lambda: (figure(scrape(url), "headway_pool_seen_timestamp_seconds") or 0) > began)
    address = dashboard(terminals, run)
    wait_until(lambda: bool(get_json(address, "/page.json")["runs"] and get_json(address, "/live.json")["status"]))
    looking = terminals.open("run", "status", "--json")
    looking.succeeds()
    return Views(
        steps=lineage(run / "metrics.jsonl"),
        evaluations=lineage(run / "evaluations.jsonl"),
        status=json.loads(looking.said[looking.said.rindex('{\n  "run"') :]),
        learner=scrape(url),
        workers=dict(of_workers(workers_port)),
        page=get_json(address, "/page.json")["runs"][0],
        live=get_json(address, "/live.json"),
        tensorboard=every_curve(run / "tensorboard"),
        answers=answers(terminals.root / "prometheus", [learners_port, *of_workers_ports(workers_port)]),
    )


def of_workers_ports(port: int) -> Iterator[int]:
    """Yield the ports at which workers answer."""
    for one in range(port, port + 10):
        with suppress(URLError):
            scrape(f"http://127.0.0.1:{one}/metrics")
            yield one


def answers(directory: Path, ports: list[int]) -> dict[str, list[Any]]:
    if not IS_INSTALLED:
        return {}
    files = [yaml.safe_load(printed(option)) for option in ("--grafana", "--alerts")]
    asked = [one for file in files for one in expressions(file) if not one.startswith("label_values(")]
    with prometheus(directory, ports) as server:
        return {one: server.ask(without_variables(one)) for one in asked}


def dashboard(terminals: Terminals, run: Path) -> str:
    served: Terminal = terminals.open("page", "dashboard", run, "--port", "0", "--json")
    wait_until(lambda: '"url"' in served.said)
    url: str = json.loads(served.said)["url"]
    return url


def of_workers(port: int) -> Iterator[tuple[str, dict[Sample, float]]]:
    """Yield the figures that each worker serves, by its name; each took the first free port."""
    for one in range(port, port + 10):
        with suppress(URLError):
            found = scrape(f"http://127.0.0.1:{one}/metrics")
            names = [dict(labels)["worker"] for name, labels in found if name == "headway_worker_info"]
            yield from ((name, found) for name in names)


def served(found: dict[Sample, float], families: tuple[Family, ...]) -> dict[str, float | None]:
    """Return the families' figures by the names that their fields have elsewhere."""
    return {
        name: figure(found, family.name, **({family.label: value} if family.label else {}))
        for family in families
        for value, name in (family.by_label or {"": family.field}).items()
    }


def lags(steps: list[Line]) -> dict[str, int]:
    counts = Counter[str]()
    for line in steps:
        counts.update(line["lag_histogram"])
    return dict(sorted(counts.items()))


def test_the_last_step_is_the_same_everywhere(views: Views) -> None:
    last = views.steps[-1]
    assert views.status["last_step"] == views.live["status"]["last_step"] == last
    shown = served(views.learner, LAST_STEP)
    assert shown == {name: last[name] for name in shown}
    algorithm = {
        dict(labels)["figure"]: value for (name, labels), value in views.learner.items() if "algorithm" in name
    }
    assert algorithm == last["algorithm"]
    assert views.page["steps"] == [line["step"] for line in views.steps] == list(range(last["step"] + 1))
    assert views.status["announced"] == f"{last['incarnation']}.{last['step'] + 1}"


def test_sums_over_steps_are_the_same_everywhere(views: Views) -> None:
    steps, summary = views.steps, views.page["summary"]
    counted = [{**line, "steps": 1, "skipped_updates": line["grad_norm"] is None} for line in steps]
    shown = served(views.learner, SUMS)
    assert shown == pytest.approx({name: sum(line[name] for line in counted) for name in shown})
    for name, key in (("steps", "steps"), ("trajectories", "trained_trajectories"), ("trained_tokens",) * 2):
        assert summary[key] == shown[name]
    seconds = sum(line["step_s"] for line in steps)
    assert summary["trained_tokens_per_s"] == pytest.approx(summary["trained_tokens"] / seconds)
    assert summary["learner_wait_fraction"] == pytest.approx((shown["take_s"] or 0) / seconds)
    assert summary["reward_last"] == pytest.approx(sum(line["reward_mean"] for line in steps[-3:]) / 3)
    assert summary["wall_s"] == steps[-1]["time_s"]
    recent = steps[-RECENT_STEPS:]
    rate = sum(line["trained_tokens"] for line in recent) / sum(line["step_s"] for line in recent)
    assert views.status["throughput"]["trained_tokens_per_s"] == pytest.approx(rate)
    assert views.live["rates"]["trained"][-1] == pytest.approx(rate)


def test_curves_are_those_of_the_record(views: Views) -> None:
    for name, curve in views.page["curves"].items():
        if name in views.steps[0]:
            assert curve["mean"] == [line[name] for line in views.steps], name
    rates = [line["trained_tokens"] / line["step_s"] for line in views.steps]
    assert views.page["curves"]["trained_tokens_per_s"]["mean"] == pytest.approx(rates)
    for name, seconds in views.page["phases"]["seconds"].items():
        assert seconds == [line[name] for line in views.steps], name


def test_curves_of_tensorboard_are_those_of_the_record(views: Views) -> None:
    """The comparison is in float32, in which TensorBoard stores values."""
    found, lines = views.tensorboard, {line["step"]: line for line in views.steps}
    told = {
        tag.removeprefix("step/"): curve for tag, curve in found.items() if tag.removeprefix("step/") in views.steps[0]
    }
    assert {"reward_mean", "lag_mean", "lag_max", "trained_tokens", "take_s"} < told.keys()
    for name, curve in told.items():
        assert curve == pytest.approx({step: line[name] for step, line in lines.items()}, rel=1e-5), name
    rates = {step: line["trained_tokens"] / line["step_s"] for step, line in lines.items()}
    assert found["step/trained_tokens_per_s"] == pytest.approx(rates, rel=1e-5)
    assert found["evaluation/pass_rate"][0] == pytest.approx(views.evaluations[0]["pass_rate"])
    for name, depth in views.status["queues"].items():
        assert found[f"queues/{name}"][views.steps[-1]["step"]] == pytest.approx(depth), name
    assert found["workers/living"][views.steps[-1]["step"]] == WORKERS


def test_lag_is_the_same_everywhere(views: Views) -> None:
    counts = lags(views.steps)
    histogram = "headway_learner_trajectory_lag_steps"
    assert figure(views.learner, f"{histogram}_count") == sum(counts.values())
    assert figure(views.learner, f"{histogram}_sum") == sum(int(lag) * count for lag, count in counts.items())
    assert views.page["lag"]["totals"] == [counts.get(str(row[0]), 0) for row in views.page["lag"]["rows"]]
    assert views.page["summary"]["max_lag_seen"] == max(line["lag_max"] for line in views.steps)
    recent = views.steps[-RECENT_STEPS:]
    assert views.status["lag_histogram"] == lags(recent)
    by_version = Counter[str]()
    for line in recent:
        for lag, count in line["lag_histogram"].items():
            by_version[f"{line['incarnation']}.{line['step'] - int(lag)}"] += count
    assert {one["version"]: one["trained"] for one in views.live["versions"] if one["trained"]} == by_version


def test_figures_by_lag_are_the_same_everywhere_and_add_up(views: Views) -> None:
    last, recent = views.steps[-1], views.steps[-RECENT_STEPS:]
    for name, _, field in BY_LAG:
        shown = {dict(labels)["lag"]: value for (of, labels), value in views.learner.items() if of == name}
        assert shown == {lag: found[field] for lag, found in last["by_lag"].items() if field in found}
    for line in views.steps:
        found = line["by_lag"].values()
        assert sum(one["trajectories"] for one in found) == line["trajectories"]
        assert (
            sum(one["tokens"] for one in found) == sum(line["token_lag_histogram"].values()) == line["trained_tokens"]
        )
        rewards = [one["trajectories"] * one["reward_mean"] for one in found if one["trajectories"]]
        assert sum(rewards) / line["trajectories"] == pytest.approx(line["reward_mean"])
        for name in ("clip_fraction", "mask_fraction", "ratio_mean"):
            mean = sum(one["tokens"] * one[name] for one in found) / line["trained_tokens"]
            assert mean == pytest.approx(line["algorithm"][name], rel=1e-5)
    for lag, shown in views.status["by_lag"].items():
        parts = [line["by_lag"][lag] for line in recent if lag in line["by_lag"]]
        assert shown["tokens"] == sum(one["tokens"] for one in parts)
        rewards = [one["trajectories"] * one["reward_mean"] for one in parts if one["trajectories"]]
        if rewards:
            assert shown["reward_mean"] == pytest.approx(sum(rewards) / shown["trajectories"])
    assert views.live["status"]["by_lag"] == views.status["by_lag"]
    assert figure(views.learner, "headway_learner_token_lag_steps_count") == sum(
        line["trained_tokens"] for line in views.steps
    )


def test_the_same_ages_are_known_everywhere(views: Views) -> None:
    """Ages grow from one look to the next, even at rest."""
    known = {name for name, age_s in views.status["ages"].items() if age_s is not None}
    assert {"oldest_lease_s", "oldest_ready_s", "mean_ready_s"} == known
    assert known == {name for name, age_s in served(views.learner, AGES).items() if age_s is not None}
    assert known == {name for name, age_s in views.live["status"]["ages"].items() if age_s is not None}


def test_queues_are_the_same_everywhere_and_add_up(views: Views) -> None:
    queues = views.status["queues"]
    assert served(views.learner, QUEUES) == views.live["status"]["queues"] == queues
    assert (queues["leased"], queues["open"], queues["dropped_stale"], queues["requeued_stale"]) == (1, 1, 0, 0)
    versions, shown = views.status["versions"], views.live["versions"]
    assert sum(version["generating"] for version in versions) == queues["open"]
    assert sum(version["ready"] for version in versions) == queues["ready"]
    assert [(version["generating"], version["ready"], version["dropped"]) for version in versions] == [
        groups for one in shown if any(groups := (one["groups_generating"], one["groups_ready"], one["groups_dropped"]))
    ]
    for name, _, field in QUEUED:
        by_lag = {dict(labels)["lag"]: value for (of, labels), value in views.learner.items() if of == name}
        announced = int(views.status["announced"].partition(".")[2])
        counted = {str(announced - version["step"]): version[field] for version in versions if version[field]}
        assert by_lag == counted, field
    for name, _, field, label in TALLIES:
        counted = {dict(labels)[label]: value for (of, labels), value in views.learner.items() if of == name}
        assert counted == views.status["tallies"][field] == views.live["status"]["tallies"][field], field
    assert sum(views.status["tallies"]["dispatched_by_lag"].values()) >= len(views.steps) * GROUPS * SAMPLES
    trained = sum(line["groups"] for line in views.steps)
    assert queues["admitted"] == trained + queues["ready"] + queues["open"]
    assert sum(version["ready_samples"] for version in versions) == SAMPLES * queues["ready"]
    ready_tokens = sum(version["ready_tokens"] for version in versions)
    assert ready_tokens == sum(version["tokens_ready"] for version in shown)
    of_open_group = queues["generated_tokens"] - sum(line["trained_tokens"] for line in views.steps) - ready_tokens
    assert SAMPLES - 1 <= of_open_group <= (SAMPLES - 1) * MOST_TOKENS
    accepted = sum(worker["submitted"] for worker in views.status["workers"])
    assert accepted == sum(line["trajectories"] for line in views.steps) + SAMPLES * (queues["ready"] + 1) - 1


def test_workers_are_the_same_everywhere(views: Views) -> None:
    told = {worker["worker"]: worker for worker in views.status["workers"]}
    on_page = {worker["worker"]: worker for worker in views.live["status"]["workers"]}
    assert told.keys() == on_page.keys() == views.workers.keys()
    assert len(told) == WORKERS
    for name, worker in told.items():
        still = worker.keys() - OF_THE_MOMENT
        assert {key: on_page[name][key] for key in still} == {key: worker[key] for key in still}
        shown = served(views.workers[name], FIGURES)
        assert {key: shown[key] for key in still & shown.keys()} == {key: worker[key] for key in still & shown.keys()}
        assert f"{shown['weight_incarnation']:.0f}.{shown['weight_step']:.0f}" == worker["version"]
        assert shown["accepted"] == worker["submitted"]
        assert figure(views.workers[name], "headway_worker_state", state=worker["state"]) == 1
        assert figure(views.learner, "headway_pool_weight_step", worker=name) == shown["weight_step"]
        assert (shown["swap_s"], shown["paused_s"]) == (worker["swap_s"], 0)
        assert worker["swap_s"] > 0
    assert figure(views.learner, "headway_pool_workers", state="idle") == WORKERS


def test_pools_are_the_same_everywhere(views: Views) -> None:
    (pool,), (on_page,) = views.status["pools"], views.live["status"]["pools"]
    of = pool["pool"]
    shown = {state: figure(views.learner, "headway_pool_processes", pool=of, state=state) for state in POOL_STATES}
    assert shown == {state: pool[state] for state in POOL_STATES} == {state: on_page[state] for state in POOL_STATES}
    assert (shown["wanted"], shown["running"]) == (WORKERS, WORKERS)
    assert views.status["quarantined"] == views.live["status"]["quarantined"] == []
    assert not any(worker["is_late"] or worker["has_ended"] for worker in views.status["workers"])
    for name in ("headway_pool_quarantined_workers", "headway_pool_late_workers"):
        assert figure(views.learner, name) == 0, name


@pytest.mark.skipif(not IS_INSTALLED, reason="prometheus, of Debian's package prometheus, is not installed")
def test_a_prometheus_server_answers_every_query(views: Views) -> None:
    alerts = set(expressions(yaml.safe_load(printed("--alerts"))))
    assert len(views.answers) >= 30
    empty = {one for one, found in views.answers.items() if not found}
    assert empty - alerts == set(), "these queries of the dashboard have no data"
    assert alerts - empty == set(), "these alerts fire at rest"


def test_evaluations_are_the_same_everywhere(views: Views) -> None:
    assert views.page["evaluations"] == views.evaluations
    assert figure(views.learner, "headway_learner_pass_rate") == views.evaluations[-1]["pass_rate"]
    assert views.page["summary"]["eval_before"] == views.evaluations[0]["pass_rate"]
