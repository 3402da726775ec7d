"""The benchmarks' entry points run and print the fields that they promise; these tests judge no figure."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import distillation
from tests.rollout_workers.marks import needs_vllm

ROOT = Path(__file__).parents[1]


def last_line(*command: str) -> Any:
    """Return the JSON object that `python -m benchmarks...` prints last."""
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
    assert [crowd["workers"] for crowd in result["workers"]] == [1, 8]
    assert all(crowd["server_cpu_us_per_sample"] > 0 for crowd in result["workers"])
    (wire,) = result["wire"]
    assert wire["frame"] < wire["raw_arrays"] < wire["pickled_lists"]
    assert wire["frame"] < wire["all_verbs"]["whole"]["to_server"] < wire["all_verbs"]["in_4_segments"]["to_server"]
    assert set(result["growth"]["through"]["per_cpu_second"]) == {"256"}


def test_pulls_are_measured_with_tls_and_without() -> None:
    result = last_line("benchmarks.pulls", "--gib", "0.05", "--rounds", "1", "--bucket-mib", "8")

    assert result["tls_over_plain"] == round(result["tls"]["gb_per_s"] / result["plain"]["gb_per_s"], 3)
    assert result["tls"]["server_cpu_s_per_gb"] > 0


def test_memory_is_watched_while_prompts_go_through() -> None:
    result = last_line("benchmarks.memory", "--prompts", "512", "--every", "128")

    assert result["prompts"] == 512
    assert result["keys"]["last"] > 0
    assert result["client_rss_bytes"]["flat"] == (result["client_rss_bytes"]["slope_per_prompt"] < 1e4)


def test_what_metrics_cost_is_measured() -> None:
    result = last_line("benchmarks.metrics_cost", "--steps", "20", "--scrapes", "2", "--workers", "4")

    assert result["workers"] == 4
    assert all(result[name] > 0 for name in ("server_look_ms", "learner_scrape_ms", "learner_share", "worker_share"))


def test_calls_of_a_reward_are_measured_in_a_thread_and_in_the_pool() -> None:
    result = last_line("benchmarks.reward_calls", "--calls", "100")

    assert result.keys() == {"1_at_once", "64_at_once"}
    for ways in result.values():
        assert all(way["calls_per_s"] > 0 and way["own_cpu_us_per_call"] > 0 for way in ways.values())


def test_scorers_are_measured_in_the_batches_that_they_make(tmp_path: Path) -> None:
    small = ("--groups", "3", "--group-size", "4", "--batch-tokens", "256", "--models", str(tmp_path))
    result = last_line("benchmarks.scorers", "--device", "cpu", "--engines", "transformers", *small)

    assert result["transformers"]["samples_per_s"] > 0
    assert 1 < result["transformers"]["mean_batch"] < 12
    assert result["failed"] == {}


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
    assert (tmp_path / "staleness.png").stat().st_size > 0

    assert last_line(*command) == result, "nothing is done twice"
    assert (tmp_path / "runs.jsonl").read_text() == runs


@pytest.mark.slow
def test_places_and_anchors_of_a_teachers_term_are_compared_at_exact_lags(tmp_path: Path) -> None:
    quick = ("--quick", "--seeds", "1", "--lags", "2")
    result = last_line("benchmarks.stale_distillation", *quick, "--output", str(tmp_path))

    assert set(result) == {"advantage/behavior", "advantage/proximal", "loss/behavior", "loss/proximal"}
    for cell in (cells["2"] for cells in result.values()):
        assert 0 <= cell["pass_rate"] <= 1
        assert len(cell["pass_rates"]) == len(cell["reverse_kl"]) == 1
    runs = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [run["curves"]["lag"] for run in runs] == [[0, 1, 2]] * 4
    # With one update a step, and where no weight is capped, both places have the same gradient.
    in_advantage, in_loss = (result[f"{place}/proximal"]["2"] for place in ("advantage", "loss"))
    assert in_advantage["pass_rate"] == pytest.approx(in_loss["pass_rate"])
    assert in_advantage["reverse_kl"] == pytest.approx(in_loss["reverse_kl"])


@pytest.mark.parametrize(("student", "shows"), [([0.3, 0.86, 0.9], True), ([0.3, 0.84, 0.86], False)])
def test_distillation_is_ahead_of_rl_only_if_it_is_with_each_seed(student: list[float], shows: bool) -> None:
    def of_seed(teacher: float, **runs: list[float]) -> distillation.Figures:
        rates = {
            name: distillation.rates_of(dict(zip((0, 64, 128), each, strict=True)), teacher)
            for name, each in runs.items()
        }
        return {"teacher": teacher, **rates}

    seeds = [of_seed(0.9, distillation=student, grpo=[0.3, 0.7, 0.88])]
    seeds.append(of_seed(0.8, distillation=[0.2, 0.6, 0.78], grpo=[0.2, 0.5, 0.7]))
    found = distillation.summary_of(seeds)
    assert found["samples_to_reach_teacher"] == {"distillation": [64 if shows else 128, 128], "grpo": [128, None]}
    assert found["distillation_needs_fewer_samples"] == shows
    assert found["grpo"] == pytest.approx({0: 0.25, 64: 0.6, 128: 0.79})
    assert found["least_over_teacher_at_last"]["grpo"] == pytest.approx(-0.1)


def test_adapters_are_swapped_in_flight_beside_whole_weights() -> None:
    small = ("--width", "64", "--layers", "2", "--vocabulary", "500", "--requests", "4", "--swaps", "1")
    on_cpu = ("--engine", "embedded", "--device", "cpu", "--dtype", "float32", "--pause-s", "0.05")
    result = last_line("benchmarks.adapter_sync", *on_cpu, *small)

    assert result["adapter"]["refused"] == {"undelivered": True}
    for kind in ("adapter", "whole"):
        (swap,) = result[kind]["swaps"]
        assert swap["tokens_before"] + swap["tokens_after"] == 4 * 256
        assert max(swap["before"], swap["after"]) < 1e-4 < swap["other"]
    assert result["adapter"]["swaps"][0]["bytes"] < result["whole"]["swaps"][0]["bytes"]


@needs_vllm
def test_an_engine_with_an_adapter_is_timed_by_its_graphs() -> None:
    small = ("--width", "128", "--layers", "1", "--vocabulary", "500", "--tokens", "8", "--repeats", "1")
    few = ("--concurrent", "4", "--prompts", "6", "--settings", "ours")
    found = last_line("benchmarks.adapter_graphs", "--device", "cpu", *small, *few)["ours"]
    assert found["start_s"] > 0 < found["tokens_per_s"][0]
