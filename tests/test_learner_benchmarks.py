"""The learner's benchmarks run, and survive a case that dies."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import models
from benchmarks.models import SHAPES, step_flops
from benchmarks.peer_losses.__main__ import difference
from benchmarks.peer_losses.ours import composed
from benchmarks.peer_losses.sample import draw
from benchmarks.processes import isolated
from benchmarks.throughput import Workload, doubled_pairs, samples
from headway.learner.batching.packing import concatenate
from headway.learner.config import ModelConfig
from headway.learner.models.pretrained import load_config, load_tokenizer

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with both toys."""
    directory = tmp_path_factory.mktemp("models")
    for name in ("toy", "toy-moe"):
        models.write(SHAPES[name], models.folder(directory, name, SHAPES[name]), "cpu")
    return directory


def last_line(*command: str, code: int = 0) -> Any:
    """Return the JSON object that `python -m benchmarks...` prints last."""
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["toy", "toy-moe"])
def test_random_weights_are_a_whole_checkpoint(folder: Path, name: str) -> None:
    path = models.folder(folder, name, SHAPES[name])
    model, said = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not any(said[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert 0.01 < model.get_output_embeddings().weight.std() < 0.03
    given = ModelConfig(path=str(path))
    assert load_config(given).rope_parameters["rope_theta"] == 1e6
    assert load_tokenizer(given).decode(load_tokenizer(given)("12+3").input_ids) == "12+3"


def test_active_parameters_are_the_published_ones() -> None:
    """Qwen3's model cards without the input embedding: 1.4 billion (and the tied head), 7.0 with 0.6 of head, 3.3."""
    billions = {name: round(shape.active_parameters / 1e9, 2) for name, shape in SHAPES.items()}
    assert billions["qwen3-1.7b"] == pytest.approx(1.4 + 0.31, abs=0.02)
    assert billions["qwen3-8b"] == pytest.approx(6.95 + 0.62, abs=0.02)
    assert billions["qwen3-30b-a3b"] == pytest.approx(3.35 - 0.31, abs=0.02)


def test_attention_counts_half_of_every_square() -> None:
    shape = SHAPES["toy"]
    flops = step_flops(shape, [10, 30])
    forward = sum(2 * 2 * length * length * 64 / 2 * shape.layers for length in (10, 30))
    assert flops.attention == 3 * forward
    assert flops.matrices == 6 * shape.active_parameters * 40


def test_lengths_have_a_long_tail() -> None:
    drawn = Workload(lengths=(1024, 16384), samples=10_000).draw(50)
    lengths = sorted(len(one.token_ids) for one in drawn)
    assert lengths[5000] == pytest.approx(1024, rel=0.05)
    assert (lengths[0], lengths[-1]) == (32, 16384)
    assert sum(lengths) / 10_000 > 1.4 * 1024


@pytest.mark.slow
def test_what_happens_in_a_case_stays_there() -> None:
    assert isolated("math:sqrt", 4.0, 1, 60) == {"result": 2.0}
    assert "ValueError" in isolated("math:sqrt", -1.0, 1, 60)["error"]
    assert "exit status -9" in isolated("signal:raise_signal", 9, 1, 60)["error"]
    assert "stopped after 2 s" in isolated("time:sleep", 100, 1, 2)["error"]


@pytest.mark.slow
def test_the_first_of_several_ranks_answers() -> None:
    assert isolated("os:getenv", "RANK", 2, 120) == {"result": "0"}


@pytest.mark.slow
def test_the_learner_is_measured_with_and_without_shared_prompts(folder: Path) -> None:
    place = ("benchmarks.throughput", "--shape", "toy", "--device", "cpu", "--models", str(folder))
    sizes = ("--groups", "1,4", "--prompts", "16", "--responses", "8", "--samples", "8", "--whole", "64")
    steps = ("--steps", "1", "--warm-ups", "0", "--tokens", "512", "--sharing", "never,auto,always")
    result = last_line(*place, *sizes, *steps)
    whole, alone, shared = result["fsdp"]
    assert (whole["never"]["tokens"], whole["samples"], result["failed"]) == (512, 8, {})
    assert alone["times_faster_auto"] == alone["times_faster_always"] == "the rows of never"
    for setting in ("auto", "always"):
        assert shared[setting]["grad_norm"] == pytest.approx(shared["never"]["grad_norm"], rel=1e-3)
    assert shared["never"]["computed"] == shared["never"]["tokens"] == shared["always"]["tokens"]
    assert shared["auto"]["computed"] < 0.7 * shared["auto"]["tokens"]
    assert alone["never"]["tokens_per_s"] == pytest.approx(
        alone["never"]["tokens"] / alone["never"]["update_s"], rel=0.01
    )


def test_what_a_row_computes_is_counted_with_and_without_shared_tokens() -> None:
    given = list(samples(6, 3, 5, 4, 50))
    alone, tree = concatenate(given), concatenate(given, is_tree=True)
    assert doubled_pairs(alone) == sum(len(one.token_ids) ** 2 for one in given)
    assert tree.tree is not None
    first_of_run, attended = tree.tree.cu_runs.tolist(), 0
    for run, length in enumerate(tree.tree.cu_paths.diff().tolist()):
        own = first_of_run[run + 1] - first_of_run[run]
        attended += sum(2 * place + 1 for place in range(length - own, length))
    assert doubled_pairs(tree) == attended < doubled_pairs(alone)


def test_peers_get_the_same_batch_as_we_and_their_losses_are_told_apart() -> None:
    sample = draw()
    for values_T in (sample.current_T, sample.mask_T, sample.spread(sample.advantages_S)):
        assert torch.equal(sample.packed(sample.padded(values_T)), values_T)
    wide, narrow = (composed("ppo_clip", {"clip_high": clip})(sample) for clip in (0.28, 0.2))
    assert difference(wide, wide) == 0
    assert difference(wide, narrow) > 1e-3


@pytest.mark.slow
def test_where_no_peer_is_installed_the_comparison_says_how_to() -> None:
    command = [sys.executable, "-m", "benchmarks.peer_losses"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "`make peer-losses` installs verl and TRL" in done.stderr
