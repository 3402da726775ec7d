"""The benchmarks' entry points run and say what they promise to say; their figures are nobody's business here."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def last_line(*command: str) -> Any:
    """The JSON object that `python -m benchmarks...` prints last."""
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_broker_is_measured_against_other_transports() -> None:
    result = last_line("benchmarks.broker", "--quick", "--only", "headway", "--only", "streams")

    laps = {lap["transport"]: lap for lap in result["throughput"]["laps"]}
    assert set(laps) == set(result["throughput"]["promises"]) == {"headway", "streams"}
    assert all(lap["trajectories_per_s"] > 0 for lap in laps.values())
    (target,) = result["throughput"]["targets"]
    assert (target["against"], target["pass"]) == ("streams", target["ratio"] >= target["at_least"])
    for verb in ("lease_ms", "submit_ms", "take_64_and_decode_ms"):
        assert 0 < result["latency"][verb]["p50"] <= result["latency"][verb]["p99"]
    (wire,) = result["wire"]
    assert wire["frame"] < wire["raw_arrays"] < wire["pickled_lists"]
    assert wire["frame"] < wire["all_verbs"]["whole"]["to_server"] < wire["all_verbs"]["in_4_segments"]["to_server"]
    assert set(result["growth"]["through"]["per_cpu_second"]) == {"256"}


def test_memory_is_watched_while_prompts_go_through() -> None:
    result = last_line("benchmarks.memory", "--prompts", "512", "--every", "128")

    assert result["prompts"] == 512
    assert result["keys"]["last"] > 0
    assert result["client_rss_bytes"]["flat"] == (result["client_rss_bytes"]["slope_per_prompt"] < 1e4)
