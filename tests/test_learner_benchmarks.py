"""The learner's benchmarks run, train the same thing in every case, and survive a case that dies."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.peer_losses.__main__ import difference
from benchmarks.peer_losses.imitated import imitated
from benchmarks.peer_losses.ours import composed
from benchmarks.peer_losses.sample import draw
from benchmarks.prefix_trees import doubled_pairs, samples
from benchmarks.stage_throughput.data import write as write_records
from benchmarks.stage_throughput.order import Order as StageOrder
from benchmarks.stage_throughput.order import Task
from benchmarks.stage_throughput.ours import measure_ordered as measure_stage
from benchmarks.throughput import checkpoint, isolated
from benchmarks.throughput.case import Case
from benchmarks.throughput.kernel_groups import summary
from benchmarks.throughput.leaks import leak_of
from benchmarks.throughput.names import stands_for
from benchmarks.throughput.results import Results, last_words
from benchmarks.throughput.rows import packed_rows, padded_rows
from benchmarks.throughput.shapes import SHAPES, step_flops
from benchmarks.throughput.workload import long_tailed_lengths, sequences
from headway.learner.batching.packing import PackableSequence, concatenate
from headway.learner.config import ModelConfig
from headway.learner.models.model import load_config, load_tokenizer

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with both toys."""
    directory = tmp_path_factory.mktemp("models")
    for name in ("toy", "toy-moe"):
        checkpoint.write(SHAPES[name], checkpoint.folder(directory, name, SHAPES[name]), "cpu")
    return directory


def toy(models: Path, name: str = "toy") -> tuple[Any, dict[str, Any]]:
    """Return the model in fp32, and the report of transformers about its loading."""
    path = checkpoint.folder(models, name, SHAPES[name])
    model, said = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    return model, said


def last_line(*command: str, code: int = 0) -> Any:
    """Return the JSON object that `python -m benchmarks...` prints last."""
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["toy", "toy-moe"])
def test_random_weights_are_a_whole_checkpoint(models: Path, name: str) -> None:
    model, said = toy(models, name)
    assert not any(said[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert 0.01 < model.get_output_embeddings().weight.std() < 0.03
    given = ModelConfig(path=str(checkpoint.folder(models, name, SHAPES[name])))
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
    lengths = sorted(long_tailed_lengths(10_000, 1024, 16384))
    assert lengths[5000] == pytest.approx(1024, rel=0.05)
    assert (lengths[0], lengths[-1]) == (32, 16384)
    assert sum(lengths) / 10_000 > 1.4 * 1024


def alone_logprobs(model: Any, sequence: PackableSequence) -> torch.Tensor:
    """Return the logprobs of one sequence in a row of its own; 0 for its first token."""
    token_ids_L = torch.from_numpy(sequence.token_ids).long()
    logprobs_LV = model(input_ids=token_ids_L[None]).logits[0].log_softmax(-1)
    return torch.nn.functional.pad(logprobs_LV[:-1].gather(1, token_ids_L[1:, None])[:, 0], (1, 0))


@pytest.mark.parametrize("rows", [None, 1, 3])
def test_padded_and_packed_rows_have_the_same_logprobs(models: Path, rows: int | None) -> None:
    model, given = toy(models)[0], sequences([7, 12, 5, 20, 3], SHAPES["toy"].vocabulary)
    padded = padded_rows(given, 40, rows, 0, 1)
    sizes = {None: [(3, 12), (2, 20)], 1: [(1, 7), (1, 12), (1, 5), (1, 20), (1, 3)], 3: [(3, 12), (2, 20)]}
    assert [tuple(one.token_ids_BL.shape) for one in padded] == sizes[rows]
    (packed,) = packed_rows(given, 1000, 0, 1)
    alone = torch.cat([alone_logprobs(model, sequence) for sequence in given])
    torch.testing.assert_close(packed.logprobs(model, CPU), alone, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.cat([one.logprobs(model, CPU) for one in padded]), alone, atol=1e-5, rtol=1e-5)


def test_every_rank_has_as_many_rows() -> None:
    given = sequences([7, 12, 5, 20, 3], 50)
    shares = [padded_rows(given, 40, 2, rank, 2) for rank in range(2)]
    assert [[one.is_real for one in share] for share in shares] == [[True, True], [True, False]]
    assert sum(one.batch.num_tokens for share in shares for one in share) == 47


def test_a_leak_between_packed_sequences_is_seen(models: Path) -> None:
    model, given = toy(models)[0], sequences([9, 12, 40], SHAPES["toy"].vocabulary)

    def leaky(position_ids: torch.Tensor, **inputs: Any) -> Any:
        return model(position_ids=torch.arange(position_ids.shape[1])[None], **inputs)

    assert not leak_of(model, given, CPU)["leaks"]
    assert leak_of(leaky, given, CPU)["leaks"]


def test_what_happens_in_a_case_stays_there() -> None:
    assert isolated.run("math:sqrt", 4.0, 1, 60) == {"result": 2.0}
    assert "ValueError" in isolated.run("math:sqrt", -1.0, 1, 60)["error"]
    assert "exit status -9" in isolated.run("signal:raise_signal", 9, 1, 60)["error"]
    assert "stopped after 2 s" in isolated.run("time:sleep", 100, 1, 2)["error"]


def test_the_first_of_several_ranks_answers() -> None:
    assert isolated.run("os:getenv", "RANK", 2, 120) == {"result": "0"}


def test_a_case_that_failed_is_tried_again_and_one_with_figures_is_not(tmp_path: Path) -> None:
    case = Case(name="fsdp", shape="toy")
    failed, measured, known = (
        Results(tmp_path).measured(case, function, 1, 60) for function in ("math:sqrt", "builtins:len", "math:sqrt")
    )
    assert last_words(failed).startswith("TypeError")
    assert measured["result"] == 1
    assert known == measured
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 2


def test_short_names_stand_for_several_cases() -> None:
    assert stands_for("fsdp,transformers-packed,fsdp") == [
        "fsdp",
        "transformers-packed-sdpa",
        "transformers-packed-flex",
    ]
    with pytest.raises(ValueError, match="transformers-padded-0"):
        stands_for("fsdp,transformers-padded-0")


@pytest.mark.slow
def test_all_cases_train_the_same(models: Path, tmp_path: Path) -> None:
    cases = "fsdp,transformers-padded-2"
    common = ("benchmarks.throughput", "--shape", "toy", "--device", "cpu", "--models", str(models))
    sizes = ("--sequences", "5", "--median-tokens", "30", "--longest-tokens", "60", "--micro-batch-tokens", "64")
    steps = ("--steps", "1", "--warm-up-steps", "0", "--profile", "--output", str(tmp_path))
    result = last_line(*common, *sizes, *steps, "--cases", cases)

    assert list(result["cases"]) == cases.split(",")
    assert (result["failed"], result["best_baseline"] in result["cases"]) == ({}, True)
    text = (tmp_path / "results.jsonl").read_text()
    lines = [json.loads(line)["result"] for line in text.splitlines()]
    for line in lines:
        assert (line["loss"], line["grad_norm"]) == pytest.approx((lines[0]["loss"], lines[0]["grad_norm"]), rel=1e-2)
        assert line["profile"]["operators"]
        assert line["tokens_per_s"] == pytest.approx(line["tokens"] / line["step_s"], rel=0.01)

    assert last_line(*common, *sizes, *steps, "--cases", cases) == result, "nothing is measured twice"
    assert (tmp_path / "results.jsonl").read_text() == text


@pytest.mark.slow
def test_prefix_trees_are_measured(models: Path) -> None:
    command = ("benchmarks.prefix_trees", "--shape", "toy", "--device", "cpu", "--models", str(models))
    sizes = ("--groups", "1,4", "--prompts", "16", "--responses", "8", "--samples", "8", "--repeats", "1")
    alone, shared = last_line(*command, *sizes)["cases"]
    assert alone["times_faster_auto"] == alone["times_faster_always"] == "the rows of never"
    for setting in ("auto", "always"):
        assert shared[setting]["grad_norm"] == pytest.approx(shared["never"]["grad_norm"], rel=1e-3)
    assert shared["never"]["computed"] == shared["never"]["tokens"] == shared["always"]["tokens"]
    assert shared["auto"]["computed"] < 0.7 * shared["auto"]["tokens"]


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


def test_kernels_are_grouped_and_pauses_between_them_are_counted() -> None:
    ran = [
        ("nvjet_hsh_256x128", 0.0, 2000.0),
        ("kernel_cutlass_kernel_flash_attnfwd", 2500.0, 3500.0),
        ("triton_red_fused__to_copy_add", 3000.0, 4000.0),
        ("vectorized_elementwise_kernel", 6000.0, 6500.0),
    ]
    found = summary(ran)
    assert found["groups_ms"] == {"gemm": 2.0, "attention": 1.0, "compiled": 1.0, "elementwise": 0.5}
    assert found["idle_ms"] == 2.5
    assert found["kernels"] == 4
    assert found["pauses"] == [
        "2.00 ms 1x triton_red_fused__to_copy_add | vectorized_elementwise_kernel",
        "0.50 ms 1x nvjet_hsh_256x128 | kernel_cutlass_kernel_flash_attnfwd",
    ]


def test_peers_get_the_same_batch_as_we_and_their_losses_are_told_apart() -> None:
    sample = draw()
    for values_T in (sample.current_T, sample.mask_T, sample.spread(sample.advantages_S)):
        assert torch.equal(sample.packed(sample.padded(values_T)), values_T)
    wide, narrow = (composed("ppo_clip", {"clip_high": clip})(sample) for clip in (0.28, 0.2))
    assert difference(wide, wide) == 0
    assert difference(wide, narrow) > 1e-3
    completions, turns = (imitated(trained)(sample) for trained in ("completion", "assistant"))
    assert difference(completions, completions) == 0
    assert difference(completions, turns) > 1e-3


def test_where_no_peer_is_installed_the_comparison_says_how_to() -> None:
    command = [sys.executable, "-m", "benchmarks.peer_losses"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "`make peer-losses` installs verl and TRL" in done.stderr


@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_a_stages_speed_is_of_all_tokens_that_it_trains(models: Path, tmp_path: Path, task: Task) -> None:
    path, output = tmp_path / "records.jsonl", checkpoint.folder(models, "toy", SHAPES["toy"])
    mean = write_records(path, task, count=8, median=1 << 20, longest=64)  # all equally long
    order = StageOrder(
        name="headway",
        task=task,
        model=str(output),
        data=str(path),
        records_per_step=4,
        longest_tokens=64,
        mean_tokens=mean,
        micro_batch_tokens=128,
        steps=1,
        warm_up_steps=1,
        device="cpu",
    )
    figures = measure_stage(msgspec.to_builtins(order))
    assert figures["tokens_per_step"] == pytest.approx(4 * mean, rel=0 if task == "sft" else 0.2)
    assert figures["tokens_per_s"] * figures["step_s"] == pytest.approx(figures["tokens_per_step"], rel=0.01)
    assert figures["first_loss"] == pytest.approx(
        {"sft": math.log(SHAPES["toy"].vocabulary), "dpo": math.log(2)}[task], rel=0.01
    )
