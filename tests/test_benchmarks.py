"""The benchmarks' entry points run and print the fields that they promise; these tests judge no figure."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def last_line(*command: str) -> Any:
    """Return the JSON object that `python -m benchmarks...` prints last."""
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_the_broker_is_measured_against_other_transports() -> None:
    result = last_line("benchmarks.broker", "--quick", "--only", "headway", "--only", "streams")

    laps = {lap["transport"]: lap for lap in result["throughput"]["laps"]}
    assert set(laps) == set(result["throughput"]["promises"]) == {"headway", "streams"}
    assert all(lap["trajectories_per_s"] > 0 for lap in laps.values())
    (target,) = result["throughput"]["targets"]
    assert (target["against"], target["pass"]) == ("streams", target["ratio"] >= target["at_least"])
    assert [crowd["workers"] for crowd in result["workers"]] == [1, 8]
    for crowd in result["workers"]:
        assert crowd["server_cpu_us_per_sample"] > 0
        for verb in ("lease_ms", "submit_ms", "take_64_and_decode_ms"):
            assert 0 < crowd[verb]["p50"] <= crowd[verb]["p99"]
    memory = result["memory"]
    assert memory["prompts"] == 512
    assert memory["keys"]["last"] > 0
    assert memory["client_rss_bytes"]["flat"] == (memory["client_rss_bytes"]["slope_per_prompt"] < 1e4)


@pytest.mark.slow
def test_corrections_are_compared_at_exact_lags(tmp_path: Path) -> None:
    command = ("benchmarks.staleness", "--quick", "--processes", "1", "--out", str(tmp_path))
    result = last_line(*command)

    assert (result["runs"], result["failed"]) == (4, [])
    assert {name: set(cells) for name, cells in result["compositions"].items()} == {
        "grpo/none": {"0", "2"},
        "grpo/tis": {"0", "2"},
    }
    for cell in (cell for cells in result["compositions"].values() for cell in cells.values()):
        assert 0 <= cell["mean"] <= 1
        assert cell["seeds"] == 1
    runs = (tmp_path / "runs.jsonl").read_text()
    for run in map(json.loads, runs.splitlines()):
        assert run["curves"]["lag"] == [min(step, run["trial"]["lag"]) for step in range(3)]
    assert "| grpo/tis |" in (tmp_path / "table.md").read_text()

    assert last_line(*command) == result, "nothing is done twice"
    assert (tmp_path / "runs.jsonl").read_text() == runs
