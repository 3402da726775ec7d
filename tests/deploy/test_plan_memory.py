"""`headway plan-memory`, as a user calls it."""

import io
import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from headway.broker.errors import ConfigError
from headway.deploy.cli.memory_report import as_builtins, page, report
from headway.deploy.recipe.resolve import load_recipe
from headway.deploy.terminal import Terminal
from headway.learner.config import ModelConfig, RandomModelConfig
from headway.learner.models.pretrained import load_config, load_tokenizer
from headway.rollout_workers.scorers.vllm_runtime import bytes_of_token
from tests.deploy.test_cli import headway

RECIPE = """
run: {name: planned}
model:
  dtype: bfloat16
  random:
    architecture: qwen3_moe
    alphabet: "0123456789"
    config: {hidden_size: 512, num_hidden_layers: 8, num_attention_heads: 8, num_key_value_heads: 4, head_dim: 64,
             num_experts: 16, num_experts_per_tok: 2, moe_intermediate_size: 1024}
prompts: {kind: arithmetic}
rewards: [{kind: arithmetic}]
algorithm: {preset: grpo}
learner: {backend: megatron, processes: 8, layout: {tensor: 2, pipeline: 2}}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "planned.yaml"
    path.write_text(RECIPE)
    return path


def shown(path: Path, device_gb: float | None = None, *overrides: str) -> str:
    console = Terminal(width=200, record=True, file=io.StringIO())
    console.print(page(report(load_recipe(path, overrides), device_gb)))
    return console.export_text()


def test_ranks_that_hold_the_same_are_one_line(recipe: Path) -> None:
    lines = shown(recipe).splitlines()
    first, last = (next(line for line in lines if f"stage {stage}" in line) for stage in (0, 1))
    assert lines.index(first) < lines.index(last), "two micro-batches in flight make the first stage the largest"
    assert "0-3" in first
    assert "4 layers, embedding" in first
    assert "4-7" in last
    assert "4 layers, head" in last
    assert "tensor 2, pipeline 2, replicas 2" in lines[0]
    assert "gathered" not in "".join(lines), "a column that no rank uses"


def test_the_settings_that_would_help_are_named_best_first(recipe: Path) -> None:
    found = as_builtins(report(load_recipe(recipe), 0.5))
    largest = found["ranks"][0]["total"]
    totals = [change["largest_bytes"] for change in found["changes"]]
    assert found["fits"] is False
    assert totals == sorted(totals)
    assert all(total < largest for total in totals)
    settings = [change["setting"] for change in found["changes"]]
    assert "learner.compute.recompute=full" in settings
    assert "learner.layout.expert=2" in settings
    assert "learner.compute.offload_optimizer=true" not in settings, "megatron has none"
    best = found["changes"][0]
    with_it = as_builtins(report(load_recipe(recipe, [best["setting"]])))
    assert with_it["ranks"][0]["total"] == best["largest_bytes"]


def test_it_says_whether_a_device_is_large_enough(recipe: Path) -> None:
    largest = report(load_recipe(recipe)).ranks[0].total / 1e9
    assert "fits a device" in shown(recipe, largest * 1.1)
    assert "does not fit" in shown(recipe, largest * 1.01), "some of it is never ours"
    assert "a device" not in shown(recipe)


@pytest.mark.parametrize("override", ["algorithm.kl.coefficient=0.1", "algorithm.preset=online_dpo"])
def test_the_reference_of_a_penalty_or_of_pairs_is_counted(override: str, recipe: Path) -> None:
    assert "other models" in shown(recipe, None, override)
    assert "other models" not in shown(recipe)


@pytest.fixture
def larger(tmp_path: Path) -> str:
    """Return the directory of a model's configuration, ten times as large as the recipe's model."""
    config = AutoConfig.for_model(
        "qwen3", hidden_size=2048, intermediate_size=8192, num_hidden_layers=24, num_attention_heads=16, vocab_size=12
    )
    config.save_pretrained(tmp_path / "larger")
    load_tokenizer(ModelConfig(random=RandomModelConfig(architecture="qwen3", alphabet="0123456789"))).save_pretrained(
        tmp_path / "larger"
    )
    return str(tmp_path / "larger")


def test_a_critic_that_starts_from_another_model_is_counted_with_its_size(recipe: Path, larger: str) -> None:
    ppo = ("algorithm.preset=ppo", "learner.backend=fsdp", "learner.layout={tensor: 1, pipeline: 1}")
    own = report(load_recipe(recipe, ppo)).ranks[0]
    found = report(load_recipe(recipe, [*ppo, f"algorithm.critic.path={larger}"])).ranks[0]
    assert found.states == own.states
    assert found.other_models > 8 * own.other_models > 0
    assert found.activations > own.activations, "the larger one decides, as they work in turn"


def test_the_largest_stage_decides_and_each_has_a_line(recipe: Path, larger: str) -> None:
    data = "data: {path: x.jsonl}"
    stages = (
        f"stages=[{{kind: reward_model, options: {{{data}}}}}, {{kind: dpo, options: {{{data}}}}},"
        f" {{kind: distill, options: {{{data}, teacher: {larger}}}}}, {{kind: rl}}]",
        "learner.backend=fsdp",
        "learner.layout={tensor: 1, pipeline: 1}",
    )
    found = as_builtins(report(load_recipe(recipe, stages)))
    assert [(stage["name"], stage["models"]) for stage in found["stages"]] == [
        ("reward_model", "reward model"),
        ("dpo", "policy"),
        ("distill", "policy, teacher before the first step"),
        ("rl", "policy"),
    ]
    scores, trained, taught, learner = (stage["largest_bytes"] for stage in found["stages"])
    assert scores < trained == learner < taught == found["ranks"][0]["total"]
    assert found["ranks"][0]["gradients"] == 0, "the teacher is gone before the student has any"
    (line,) = [line for line in shown(recipe, None, *stages).splitlines() if "teacher before" in line]
    assert line.split()[0] == "distill"
    small = as_builtins(report(load_recipe(recipe, [*stages, "stages.distill.options.teacher=stage:dpo"])))
    assert small["ranks"][0]["gradients"] > 0, "training takes more than to ask a teacher of the student's size"


def test_scorers_are_counted_where_they_lie(recipe: Path, larger: str) -> None:
    scorers = (
        f"teacher.path={larger}",
        f"rewards=[{{kind: reward_model, path: {larger}}}]",
        "scorers={count: 2, device: cuda, devices: [6, 7, 7], dtype: bfloat16, batch_tokens: 64}",
    )
    found = report(load_recipe(recipe, scorers))
    reward, teacher = found.scorers
    assert (reward.gpus, teacher.gpus) == (["6", "7"], ["6", "7"])
    assert reward.total is not None
    assert teacher.total is not None
    assert reward.shared == teacher.shared == reward.total + teacher.total
    text = shown(recipe, None, *scorers)
    assert "Scorer reward_model on GPU 6, 7: " in text
    assert "with the other scorers of this GPU" in text
    fits = max(found.ranks[0].total, teacher.shared) / 0.95 / 1e9
    assert report(load_recipe(recipe, scorers), fits * 1.01).fits
    device_gb = teacher.shared / 0.96 / 1e9
    assert found.ranks[0].total < teacher.total, "a scorer is the largest here"
    assert report(load_recipe(recipe, scorers), device_gb).fits is False
    assert "The scorers do not fit" in shown(recipe, device_gb, *scorers)
    assert report(load_recipe(recipe, [*scorers, "scorers.device=cpu"]), device_gb).fits


def test_a_scorers_engine_decides_its_memory_and_its_gpus(recipe: Path, larger: str) -> None:
    """vLLM keeps keys and values of the requests that it gets, and splits a model over several GPUs."""
    scorers = (
        f"teacher.path={larger}",
        "scorers={device: cuda, devices: ['2,3', '4,5'], count: 2, batch_tokens: 4096}",
    )
    vllm = [*scorers, "scorers.engine.kind=vllm"]
    (one,) = report(load_recipe(recipe, vllm)).scorers
    (more,) = report(load_recipe(recipe, [*vllm, "scorers.batch_tokens=8192"])).scorers
    halves = [*scorers, "scorers.engine={kind: vllm, options: {tensor_parallel_size: 2}}"]
    (half,) = report(load_recipe(recipe, halves)).scorers
    assert one.gpus == ["2", "3", "4", "5"]
    assert one.total is not None
    assert more.total is not None
    assert more.total - one.total == 4096 * bytes_of_token(load_config(ModelConfig(path=larger)), "float32")
    assert half.total == one.total // 2
    with pytest.raises(ConfigError, match=r"scorers.devices gives '2' to one process, whose engine takes 2 GPUs"):
        load_recipe(recipe, [*halves, "scorers.devices=[2]"])


def test_a_scorer_whose_model_is_not_known_is_told(recipe: Path) -> None:
    text = shown(recipe, 100.0, "teacher.path=./nowhere", "scorers.device=cuda")
    assert "Scorer teacher on a GPU: ./nowhere is not known. " in text
    assert "The largest rank fits" in text


def test_the_command_prints_json_and_its_exit_code_tells(recipe: Path, tmp_path: Path) -> None:
    done = headway("plan-memory", str(recipe), "--json", "--device-memory", "0.5", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert len(found["ranks"]) == 8
    assert found["replicas"] == 2
    assert set(found["activations"]) == {"none", "selective", "full"}


def test_what_a_colocated_run_keeps_where(recipe: Path) -> None:
    settings = ("learner.device=cuda", "engine.kind=vllm")
    turns = ("run.placement=colocated", *settings)
    found = as_builtins(report(load_recipe(recipe, [*turns, "weights.staging=device"])))
    state = max(rank["parameters"] + rank["optimizer"] for rank in found["ranks"])
    assert found["turns"] == {"host": state, "device": 4 * found["parameters"]}
    assert "lie in host memory" in shown(recipe, None, *turns)
    assert "leaves an engine 0.95 GB of 1.00 GB" in shown(recipe, 1.0, *turns)
    assert as_builtins(report(load_recipe(recipe, turns)))["turns"]["device"] == 0
    assert as_builtins(report(load_recipe(recipe, settings)))["turns"] is None


def test_versions_that_lie_on_gpus_are_counted_where_they_lie(recipe: Path) -> None:
    """The learner's first GPU holds the version that it sends; the first one of each engine holds the received one."""
    on_gpus = ("learner.device=cuda", "engine.kind=vllm", "weights.staging=device")
    turns = (*on_gpus, "run.placement=colocated", "engine.options.tensor_parallel_size=2", "workers.count=3")
    alone = published(recipe, *on_gpus, "weights.transport=nccl")
    assert alone == [1, 0, 0, 0, 0, 0, 0, 0]
    assert published(recipe, *turns) == [2, 0, 1, 0, 1, 0, 0, 0]
    assert published(recipe, *turns, "weights.staging=host") == [0] * 8


def published(recipe: Path, *settings: str) -> list[float]:
    """Return how many versions in bfloat16 each rank holds."""
    found = as_builtins(report(load_recipe(recipe, settings)))
    ranks = sorted(found["ranks"], key=lambda rank: rank["rank"])
    return [rank["published"] / (2 * found["parameters"]) for rank in ranks]


def test_the_verdict_counts_versions_that_lie_beside_the_learner(recipe: Path) -> None:
    turns = ("run.placement=colocated", "learner.device=cuda", "engine.kind=vllm")
    without = report(load_recipe(recipe, turns))
    device_gb = without.ranks[0].total / 0.9 / 1e9
    assert "fits a device" in shown(recipe, device_gb, *turns)
    text = shown(recipe, device_gb, *turns, "weights.staging=device")
    assert "does not fit" in text
    change = next(line for line in text.splitlines() if "weights.staging=host" in line)
    assert "fits" in change
