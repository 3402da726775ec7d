"""The page of a run: its JSON has the run's figures, its HTML holds that JSON, asks no other host and obeys no text."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from click.testing import CliRunner

from headway.broker.errors import ConfigError
from headway.deploy.cli.main import cli
from headway.deploy.observe.page.content import COLUMNS, POINTS, ROWS, SHOWN_PARTS, curve, lag_map, spans
from headway.deploy.recipe.resolve import load_recipe
from headway.deploy.run.record import LAST_LOOK, METRICS, TRAINED, read_summary
from headway.deploy.run.run_directory import held
from headway.deploy.run.stage_output import StageRecord, record_of
from tests.deploy.runs import open_record, stage_event, step_event, step_metrics

from .pages import Elements, headway, write_run


def pictured(directory: Path) -> dict[str, Any]:
    """Return the only run of a report's JSON."""
    (run,) = json.loads(headway("report", str(directory), "--json"))["runs"]
    found: dict[str, Any] = run
    return found


def test_the_json_holds_what_the_files_say(tmp_path: Path) -> None:
    run = pictured(write_run(tmp_path / "run"))
    assert (run["name"], run["state"], run["notes"]) == ("run", "stopped", [])
    assert run["summary"] == read_summary(tmp_path / "run")
    assert run["steps"] == [0, 1, 2, 3, 4]
    assert run["curves"]["reward_mean"] == {"mean": [0, 0.25, 0.5, 0.75, 1], "low": [], "high": []}
    assert run["curves"]["reward_average"]["mean"] == [0, 0.125, 0.25, 0.375, 0.5]
    assert run["curves"]["trained_tokens_per_s"]["mean"] == [2000] * 5
    assert run["curves"]["trained_tokens_per_s_average"]["mean"] == [2000] * 5
    assert run["phases"]["seconds"]["take_s"] == [0.5] * 5
    assert run["lag"]["rows"] == [[0, 0], [1, 1], [2, 2]]
    assert run["lag"]["trajectories"] == [[20, 200, 36]] * 5
    assert run["lag"]["totals"] == [100, 1000, 180]
    assert [(each["step"], each["pass_rate"]) for each in run["evaluations"]] == [(0, 0.25), (5, 0.875)]
    assert run["max_lag"] == load_recipe("arithmetic.yaml").staleness.max_lag
    assert "secret" not in run["recipe"]


def test_without_a_run_the_report_is_of_the_newest_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADWAY_RUN", raising=False)
    for began, name in enumerate(("newer", "oldest"), -2):
        os.utime(write_run(tmp_path / "runs" / name) / "config.yaml", (1e9 - began,) * 2)
    answer = CliRunner().invoke(cli, ["report", "--json"])
    assert [run["name"] for run in json.loads(answer.stdout)["runs"]] == ["newer"]
    assert "this is the newest, runs/newer" in answer.stderr
    monkeypatch.setenv("HEADWAY_RUN", "oldest")
    assert json.loads(headway("report", "--json"))["runs"][0]["name"] == "oldest"


def test_without_any_run_the_report_says_where_it_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADWAY_RUN", raising=False)
    with pytest.raises(ConfigError, match=f"no run below {tmp_path / 'runs'}"):
        headway("report")


def test_a_damaged_last_look_is_told(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    assert pictured(directory)["last_look"] is None
    (directory / LAST_LOOK).write_text("{")
    run = pictured(directory)
    assert run["last_look"] is None
    assert [note for note in run["notes"] if f"{LAST_LOOK} is damaged" in note] == run["notes"] != []


def test_stages_without_workers_have_curves(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    for stage, steps in (("stages/10-kto", 1), ("stages/2-dpo", 3), ("sft", 2)):
        record = StageRecord(record_of(directory / stage), 0)
        for step in range(1, steps + 1):
            held_out = {"metrics": {"held_out/loss": 0.25, "norm": 2.0}} if step > 1 else {}
            record.write(stage_event(step, pass_rate=None if stage != "sft" else 0.5, **held_out))
    sft, dpo, kto = pictured(directory)["stages"]
    assert [stage["name"] for stage in (sft, dpo, kto)] == ["sft", "2-dpo", "10-kto"]
    assert (dpo["steps"], dpo["curves"]["loss"]["mean"]) == ([1, 2, 3], [1, 0.5, 1 / 3])
    assert dpo["curves"]["held_out/loss"]["mean"] == [None, 0.25, 0.25]
    assert [list(stage["curves"]) for stage in (sft, kto)] == [["loss", "pass_rate", "held_out/loss"], ["loss"]]


def test_the_parts_of_a_reward_have_curves_and_are_no_markup(tmp_path: Path) -> None:
    directory, markup = write_run(tmp_path / "run"), "<img src=x onerror=alert(1)>"
    rewards: list[dict[str, float]] = [{"exact": 1.0, markup: 0.0}, {"exact": 0.0, "exact/judge": 0.5}]
    rewards += [{"exact": 0.5} | {f"rare/{step}/{number}": 0.0 for number in range(9)} for step in range(2)]
    for step, reward in enumerate(rewards, 5):
        metrics = msgspec.structs.replace(step_event(step, incarnation=2).metrics, reward=reward)
        open_record(directory).write(msgspec.structs.replace(step_event(step), metrics=metrics))
    parts = pictured(directory)["reward_parts"]
    assert len(parts) == SHOWN_PARTS
    assert {"exact", "exact/judge", markup} < set(parts)
    assert parts["exact"]["mean"] == [None] * 5 + [1.0, 0.5, 0.5, 0.5]
    assert parts["exact/judge"]["mean"][5:] == [None, 0.5, 0.5, 0.5]
    headway("report", str(directory), "--output", str(tmp_path / "page.html"))
    elements = Elements((tmp_path / "page.html").read_text())
    assert (elements.tags["script"], elements.tags["img"]) == (2, 0)


def test_a_branch_and_a_skipped_update_are_events(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    skipped = msgspec.structs.replace(step_event(5, incarnation=3).metrics, grad_norm=None)
    open_record(directory).write(msgspec.structs.replace(step_event(5), metrics=skipped))
    events = pictured(directory)["events"]
    assert [(event["kind"], event["step"]) for event in events] == [
        ("start", 0),
        ("branch", 3),
        ("restart", 5),
        ("skipped update", 5),
    ]
    assert events[1]["text"] == "Learner 2 went back to step 3 and trained step 3 anew."


def test_the_page_holds_the_json_and_asks_no_other_host(tmp_path: Path) -> None:
    directory, output = write_run(tmp_path / "run"), tmp_path / "page.html"
    assert headway("report", str(directory), "--output", str(output)) == f"Page: {output}\n"
    elements = Elements(output.read_text())
    shown = json.loads(elements.texts["content"])
    assert shown["runs"] == json.loads(headway("report", str(directory), "--json"))["runs"]
    assert elements.links == ["data:,"]
    assert elements.texts["title"] == "run - Headway"
    assert "connect-src" not in output.read_text()
    assert (elements.tags["script"], elements.tags["img"], elements.tags["iframe"]) == (2, 0, 0)


def test_the_page_of_a_run_lies_in_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, here = write_run(tmp_path / "runs" / "mine"), tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    assert headway("report", str(directory)) == f"Page: {directory}/report.html\n"
    assert (directory / "report.html").stat().st_size > 10_000
    assert list(here.iterdir()) == []
    monkeypatch.chdir(tmp_path)
    assert headway("report", "mine") == "Page: runs/mine/report.html\n"


@pytest.mark.parametrize(
    "name", ["</script><script>alert(1)</script>", "{{script}}", "<!--<script>", "a\u2028&amp;\x1b["]
)
def test_no_text_of_a_run_becomes_markup(name: str, tmp_path: Path) -> None:
    directory, output = write_run(tmp_path / name.replace("/", "_")), tmp_path / "page.html"
    (directory / "config.yaml").write_text(json.dumps({"run": {"name": name}, name: name}))
    headway("report", str(directory), "--output", str(output))
    elements = Elements(output.read_text())
    assert elements.tags == Counter(
        html=1, head=1, meta=4, title=1, link=1, style=1, body=1, main=1, noscript=1, script=2
    )
    assert yaml.safe_load(json.loads(elements.texts["content"])["runs"][0]["recipe"])[name] == name


def test_missing_torn_and_damaged_files_are_told(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    (directory / "config.yaml").unlink()
    (directory / "summary.json").write_bytes(b"{")
    metrics = (directory / METRICS).read_bytes().splitlines(keepends=True)
    (directory / METRICS).write_bytes(b"".join([*metrics[:2], b"\xff\n", *metrics[2:], b'{"incarn']))
    run = pictured(directory)
    assert run["steps"] == [0, 1, 2, 3, 4]
    assert run["summary"]["unreadable_lines"] == 1
    damaged, torn, summary, config = run["notes"]
    assert damaged == "metrics.jsonl has damaged lines, which no figure here counts: 1."
    assert torn.startswith("The last line of metrics.jsonl has no end, and is left out")
    assert "summary.json is damaged" in summary
    assert config == "config.yaml is missing. The run's recipe is unknown."
    assert run["recipe"] == ""


def test_a_run_without_a_step_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("staleness: [")
    run = pictured(tmp_path)
    assert (run["steps"], run["curves"]["loss"]["mean"], run["lag"]["trajectories"]) == ([], [], [])
    assert run["notes"][0].startswith("metrics.jsonl is missing. No step has been trained")
    assert "is not valid YAML" in run["notes"][1]


def test_a_summary_that_is_older_than_the_steps_is_not_shown(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    open_record(directory).write(step_event(5, ["g5:0:0"], incarnation=2))
    run = pictured(directory)
    assert (run["summary"]["steps"], run["summary"]["trained_trajectories"]) == (6, 6)
    assert not {"generated_tokens", "worker_restarts"} & set(run["summary"])
    (note,) = run["notes"]
    assert note.startswith("summary.json is older")


def test_a_run_that_a_process_holds_is_running_and_a_report_leaves_no_trace(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    assert pictured(directory)["state"] == "stopped"
    assert sorted(tmp_path.rglob("*")) == before
    with held(directory):
        assert pictured(directory)["state"] == "running"


def test_ten_thousand_steps_are_thinned_and_keep_what_sticks_out(tmp_path: Path) -> None:
    steps = [
        msgspec.structs.replace(step_metrics(step), loss=9.0 if step == 5001 else 0.5, lag_histogram={step % 100: 2})
        for step in range(10_000)
    ]
    (tmp_path / METRICS).write_bytes(b"".join(msgspec.json.encode(step) + b"\n" for step in steps))
    (tmp_path / TRAINED).touch()
    output = tmp_path / "page.html"
    headway("report", str(tmp_path), "--output", str(output))
    assert output.stat().st_size < 250_000
    (run,) = json.loads(Elements(output.read_text()).texts["content"])["runs"]
    assert len(run["steps"]) == POINTS
    assert run["steps"][-1] == 9_999
    assert max(run["curves"]["loss"]["high"]) == 9.0
    assert len(run["phases"]["first"]) == COLUMNS
    assert len(run["lag"]["rows"]) <= ROWS
    assert sum(map(sum, run["lag"]["trajectories"])) == sum(run["lag"]["totals"]) == 20_000


@pytest.mark.parametrize("count", [0, 1, 399, 400, 401, 1000])
def test_spans_cover_everything_once(count: int) -> None:
    cut = spans(count, 400)
    assert [index for span in cut for index in range(span.start, span.stop)] == list(range(count))
    assert len(cut) == min(count, 400)
    assert all(span.stop > span.start for span in cut)


def test_unknown_values_leave_a_gap() -> None:
    assert curve([1.0, None, 3.0]).mean == [1.0, None, 3.0]
    thinned = curve([None] * 500 + [2.0, None] * 250)
    assert (thinned.mean[0], thinned.low[0], thinned.mean[-1], thinned.high[-1]) == (None, None, 2.0, 2.0)


def test_a_lag_of_any_size_has_few_rows() -> None:
    steps = [msgspec.structs.replace(step_metrics(0), lag_histogram={0: 1, 10**9: 3})]
    shown = lag_map(steps)
    assert len(shown.rows) <= ROWS
    assert (shown.totals[0], shown.totals[-1]) == (1, 3)


def test_no_run_is_an_error_that_names_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"There is no run .*has a config.yaml or metrics.jsonl"):
        headway("report", str(tmp_path / "nowhere"))
