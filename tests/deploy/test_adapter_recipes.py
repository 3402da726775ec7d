"""A recipe says which stages train an adapter, and is refused where none can; a run leaves the adapter."""

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DeepseekV3Config

from headway.broker.errors import ConfigError
from headway.broker.user_code.import_paths import ImportRoots
from headway.deploy.cli.main import answer
from headway.deploy.launch.local_run import LocalRun
from headway.deploy.recipe.adapter_support import (
    UnfitEngineError,
    WeightlessModel,
    adapted_by,
    adapters_held,
    check_targets,
    rank_for_worker,
    sends_adapter,
    why_merged,
)
from headway.deploy.recipe.preflight import check_data, check_packages
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.recipe.resolve import dump_recipe, load_recipe
from headway.deploy.roles import export
from headway.deploy.run.resumable_keys import check_resumable
from headway.deploy.run.run_directory import SETTINGS
from headway.deploy.run.stage_output import after_stages, origin, planned
from headway.deploy.terminal import Terminal
from headway.learner.backends import open_backend
from headway.learner.backends.adapter import open_weights
from headway.learner.backends.fsdp.sharding import local
from headway.learner.backends.hugging_face_files import write_tensors
from headway.learner.backends.snapshots import SnapshotWriter
from headway.learner.checkpoint import LearnerState, seal
from headway.learner.config import ModelConfig
from headway.learner.models.pretrained import load_config
from headway.learner.ranks import Ranks
from headway.rollout_workers.engines import open_engine
from tests import plugged
from tests.end_to_end.recipes import TINY
from tests.learner.adapted import saved_base, with_adapter
from tests.learner.tiny import OPTIMIZER, model_config
from tests.rollout_workers.models import make_model, save_config

from .test_stages import OWN, OWN_STAGE, RL, SFT, load

OF_RL = {"rank": 4, "stages": ["rl"]}
ENGINES = (TINY["engine"], {**TINY["engine"], "kind": "vllm"})


def adapted(adapter: dict[str, Any]) -> dict[str, Any]:
    return {**TINY["model"], "adapter": adapter}


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"adapter": {"stages": ["lr"]}}, r"adapter\.stages names 'lr', and the recipe's stages are sft, rl\."),
        ({"adapter": {**OF_RL, "dropout": 0.1}}, r"dropout is 0\.1, and stage rl compares logprobs"),
        ({"adapter": {}}, r"stage sft starts from random weights. Set model\.path"),
        ({"adapter": {**OF_RL, "quantize_base": "int8"}, "backend": "megatron"}, r"quantize_base is int8, and learner"),
        ({"adapter": {"rank": 0}}, r"model\.adapter\.rank is 0; expected"),
        ({"adapter": {"kind": "dora"}}, r"model\.adapter\.kind is 'dora'"),
        ({"adapter": {"ranks": 4}}, r"unknown key model\.adapter\.ranks; did you mean model\.adapter\.rank\?"),
    ],
)
def test_a_wrong_adapter_is_told(sections: dict[str, Any], told: str, tmp_path: Path) -> None:
    learner = {**TINY.get("learner", {}), "backend": sections.get("backend", "fsdp")}
    with pytest.raises(ConfigError, match=told):
        load(tmp_path, model=adapted(sections["adapter"]), stages=[SFT, RL], learner=learner)


@pytest.mark.parametrize(
    ("kind", "tied", "changes", "told"),
    [
        ("qwen3", True, {"targets": ["q_proj", "lm_head"]}, r"targets: this model has no 'lm_head'.* It has q_proj"),
        ("qwen3", False, {"targets": ["lm_head"]}, "has no 'lm_head'"),
        ("qwen3", True, {"targets": ["embed_tokens"]}, "has no 'embed_tokens'"),
        ("qwen3", True, {"targets": ["all-linear"]}, "has no 'all-linear'"),
        ("qwen3", True, {"targets": ["q_prj"]}, "has no 'q_prj'"),
        ("qwen3_moe", False, {"targets": ["mlp.gate"]}, "has no 'mlp.gate'"),
        ("qwen3_moe", False, {"dropout": 0.1, "stages": ["sft"]}, "the adapter changes experts, which PEFT's form"),
        ("qwen3", True, {"targets": ["q_proj", "mlp.down_proj"]}, ""),
        ("qwen3_moe", False, {"targets": ["experts.down_proj"]}, ""),
    ],
)
def test_what_an_adapter_cannot_change_is_told_by_a_model_without_weights(
    kind: str, tied: bool, changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    base = saved_base(model_config(kind, tied=tied), tmp_path / "base")
    model = {"path": base.path, "adapter": {"rank": 4, **changes}}
    complaint = WeightlessModel(model).complaint()
    assert re.search(told, complaint) if told else not complaint


@pytest.mark.slow
def test_what_an_adapter_cannot_change_is_refused_before_a_run_starts(tmp_path: Path) -> None:
    base = saved_base(model_config("qwen3", tied=True), tmp_path / "base")
    model = {"path": base.path, "random": None, "adapter": {"rank": 4, "targets": ["q_proj", "lm_head"]}}
    with pytest.raises(ConfigError, match=r"^model\.adapter\.targets: this model has no 'lm_head'"):
        check_data(load(tmp_path, model=model, stages=[SFT, RL]), is_new=True)


def test_the_targets_of_a_model_that_is_not_here_yet_are_left_to_the_learner(tmp_path: Path) -> None:
    model = {"path": "somebody/elses", "random": None, "adapter": {"rank": 4, "targets": ["lm_head"]}}
    check_targets(load(tmp_path, model=model, stages=[SFT, RL]))


def test_a_stage_trains_the_adapter_if_it_is_named(tmp_path: Path) -> None:
    recipe = load(tmp_path, model=adapted(OF_RL), stages=[SFT, RL])
    assert [recipe.adapter_in(stage) is not None for stage in recipe.plan] == [False, True]
    plain = load(tmp_path, stages=[SFT, RL])
    assert origin(recipe, 0) == origin(plain, 0), "the warm-up is the same, and is not made again"
    assert origin(recipe, 1) != origin(plain, 1)
    assert after_stages(recipe).model.adapter == recipe.model.adapter


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize(("device", "dtype", "alone"), [("cpu", "float32", True), ("cuda", "float32", False)])
def test_an_engine_on_a_gpu_takes_no_adapters_in_float32(
    kind: str, device: str, dtype: str, alone: bool, tmp_path: Path
) -> None:
    engine = {**TINY["engine"], "kind": kind, "device": device, "dtype": dtype}
    recipe = load(tmp_path, stages=[SFT, RL], engine=engine, model=adapted(OF_RL))
    assert sends_adapter(recipe, "dense") is alone


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({}, ""),
        ({"weights": {"adapter": "merged"}}, "weights.adapter is merged"),
        ({"weights": {"adapter": "alone"}}, ""),
        (
            {"engine": {**TINY["engine"], "kind": plugged.ADAPTED_ENGINE}},
            f"the engine {plugged.ADAPTED_ENGINE} is your own, which gets adapters by weights.adapter=alone",
        ),
        ({"engine": {**TINY["engine"], "kind": plugged.ENGINE}, "weights": {"adapter": "alone"}}, ""),
        ({"engine": {**TINY["engine"], "kind": "vllm"}}, "the engine vllm takes no adapters of models with experts"),
        ({"weights": {"transport": "ipc", "staging": "none"}}, "weights.staging is none"),
        (
            {"workers": {"count": 1, "pools": [{"name": "v", "count": 1, "engine": {"kind": "vllm"}}]}},
            "the engine vllm takes no adapters of models with experts",
        ),
    ],
)
def test_versions_carry_the_adapter_alone_where_all_engines_take_it(
    sections: dict[str, Any], why: str, tmp_path: Path
) -> None:
    alone = not why
    recipe, plain = (load(tmp_path, stages=[SFT, RL], **sections, **model) for model in ({"model": adapted(OF_RL)}, {}))
    assert sends_adapter(recipe, "experts") is alone
    assert why_merged(recipe, "experts") == why
    assert not sends_adapter(plain, "experts")
    is_vllm = recipe.engine.kind == "vllm" or bool(recipe.workers.pools)
    assert sends_adapter(recipe, "dense") is (alone or is_vllm)


@pytest.mark.parametrize(
    ("kind", "name", "targets", "alone"),
    [
        ("sglang", "qwen3_moe", ["q_proj", "o_proj"], True),
        ("sglang", "qwen3_moe", ["q_proj", "experts.down_proj"], False),
        ("sglang", "qwen3_moe", [], False),
        ("sglang", "qwen3", [], True),
        ("vllm", "qwen3_moe", ["q_proj", "o_proj"], False),
        ("embedded", "qwen3_moe", ["experts.down_proj"], True),
    ],
)
def test_of_a_model_with_experts_some_engines_take_adapters_of_attention_alone(
    kind: str, name: str, targets: list[str], alone: bool, tmp_path: Path
) -> None:
    def loaded(**weights: str) -> Recipe:
        engine, model = {**TINY["engine"], "kind": kind}, adapted({**OF_RL, "targets": targets})
        return load(tmp_path, model=model, stages=[SFT, RL], engine=engine, weights=weights)

    config, recipe = load_config(model_config(name)), loaded()
    assert rank_for_worker(recipe, recipe.engine, config) == (4 if alone else 0)
    if alone:
        return
    for weights, told in (
        ({"kv_policy": "finish"}, r"on sglang model\.adapter\.targets of attention alone, .* recompute"),
        ({"adapter": "alone"}, f"the engine {kind} takes (no adapters|adapters of attention alone,) of models with"),
    ):
        recipe = loaded(**weights)
        with pytest.raises(ConfigError, match=told):
            rank_for_worker(recipe, recipe.engine, config)


@pytest.mark.parametrize(("rank", "targets"), [(16, ["q_b_proj", "o_proj"]), (None, ["q_proj", "o_proj"])])
def test_an_adapter_of_attention_over_latent_vectors_is_sent_merged_to_sglang(
    rank: int | None, targets: list[str], tmp_path: Path
) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    latent = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    config = DeepseekV3Config(**sizes, **latent, **experts, q_lora_rank=rank, first_k_dense_replace=1, vocab_size=99)
    engine, model = {**TINY["engine"], "kind": "sglang"}, adapted({**OF_RL, "targets": targets})
    recipe = load(tmp_path, model=model, stages=[SFT, RL], engine=engine)
    assert adapted_by(recipe, config) == "experts"
    assert rank_for_worker(recipe, recipe.engine, config) == 0


def test_samples_finish_with_their_adapter_where_engines_hold_several(tmp_path: Path) -> None:
    finish = {"weights": {"kv_policy": "finish"}}
    on_vllm = {**finish, "engine": {**TINY["engine"], "kind": "vllm"}}
    recipe = load(tmp_path, model=adapted(OF_RL), stages=[SFT, RL], staleness={"max_lag": 5}, **on_vllm)
    dense, experts = (load_config(model_config(name)) for name in ("qwen3", "qwen3_moe"))
    assert (rank_for_worker(recipe, recipe.engine, dense), adapters_held(recipe)) == (4, 6)
    with pytest.raises(ConfigError, match=r"sglang on one GPU, .* recompute"):
        rank_for_worker(recipe, recipe.engine, experts)
    with pytest.raises(UnfitEngineError, match=r"\(embedded\) holds one adapter"):
        rank_for_worker(recipe, load(tmp_path).engine, dense)
    for sections in (
        finish,
        {**on_vllm, "model": TINY["model"]},
        {**on_vllm, "weights": {**finish["weights"], "adapter": "merged"}},
    ):
        with pytest.raises(ConfigError, match=r"weights\.kv_policy is finish"):
            load(tmp_path, **{"model": adapted(OF_RL), "stages": [SFT, RL], **sections})


@pytest.mark.parametrize(
    ("option", "device", "why"),
    [
        ("tensor_parallel_size", "cpu", ""),
        ("tensor_parallel_size", "cuda", "an engine has 2 GPUs by tensor_parallel_size"),
        ("pipeline_parallel_size", "cpu", "an engine has 2 GPUs by pipeline_parallel_size"),
    ],
)
def test_an_engine_on_several_gpus_gets_adapters_only_if_it_proves_them(
    option: str, device: str, why: str, tmp_path: Path
) -> None:
    engine = {**TINY["engine"], "kind": "vllm", "device": device, "dtype": "bfloat16", "options": {option: 2}}
    recipe = load(tmp_path, model=adapted(OF_RL), stages=[SFT, RL], engine=engine)
    assert why_merged(recipe, "dense") == why


def test_a_worker_gets_what_the_run_sends_or_is_refused(tmp_path: Path) -> None:
    recipe, own = (load(tmp_path, model=adapted(OF_RL), stages=[SFT, RL], engine=one) for one in ENGINES)
    dense, experts = (load_config(model_config(name)) for name in ("qwen3", "qwen3_moe"))
    assert rank_for_worker(recipe, own.engine, dense) == 4
    assert rank_for_worker(own, recipe.engine, experts) == 0, "all get merged weights, whatever this one could take"
    with pytest.raises(UnfitEngineError, match=r"\(vllm\) takes whole weights .* weights\.adapter=merged"):
        rank_for_worker(recipe, own.engine, experts)


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"weights": {"adapter": "alone", "transport": "ipc", "staging": "none"}}, r"and weights\.staging is none"),
        ({"weights": {"adapter": "alone"}, "run": {"placement": "colocated"}}, r"and run\.placement is colocated"),
        (
            {"weights": {"adapter": "alone"}, "engine": {**ENGINES[1], "options": {"pipeline_parallel_size": 2}}},
            r"and an engine has 2 GPUs by pipeline_parallel_size\. Set weights\.adapter=merged",
        ),
    ],
)
def test_a_run_that_must_send_adapters_alone_says_what_keeps_it(
    sections: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"weights\.adapter is alone, " + told):
        load(tmp_path, model=adapted(OF_RL), stages=[SFT, RL], **sections)
    sections = {**sections, "weights": {**sections["weights"], "adapter": "auto"}}
    load(tmp_path, model=adapted(OF_RL), stages=[SFT, RL], **sections)


def test_an_engine_of_ones_own_is_asked_whether_it_takes_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugged.write(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HEADWAY_IMPORT_PATH", str(tmp_path))
    monkeypatch.delitem(sys.modules, "plugged", raising=False)
    dense, experts = (load_config(model_config(name)) for name in ("qwen3", "qwen3_moe"))
    roots = ImportRoots()
    whole, takes = (
        load(
            tmp_path,
            model=adapted(OF_RL),
            stages=[SFT, RL],
            engine={**TINY["engine"], "kind": kind},
            weights={"adapter": "alone"},
        )
        for kind in (plugged.ENGINE, plugged.ADAPTED_ENGINE)
    )
    check_packages(takes, has_workers=True)
    assert rank_for_worker(takes, takes.engine, dense, roots) == 4
    with pytest.raises(UnfitEngineError, match="takes no adapters of models with experts"):
        rank_for_worker(takes, takes.engine, experts, roots)
    check_packages(whole, has_workers=False)
    with pytest.raises(ConfigError, match=r"the engine plugged:ForwardEngine takes no adapters"):
        check_packages(whole, has_workers=True)
    with pytest.raises(UnfitEngineError, match=r"worker's engine \(plugged:ForwardEngine\) takes whole weights"):
        rank_for_worker(takes, whole.engine, dense, roots)
    with pytest.raises(ConfigError, match="makes a ForwardEngine, which lacks load_base, score_base, swap_adapter"):
        open_engine(whole.engine, save_config(make_model("dense", 0), tmp_path / "model"), seed=0, adapter_rank=4)


def test_a_run_goes_on_with_what_it_trains(tmp_path: Path) -> None:
    before, plain = load(tmp_path, model=adapted(OF_RL), stages=[SFT, RL]), load(tmp_path, stages=[SFT, RL])
    other = load(tmp_path, model=adapted({**OF_RL, "rank": 8}), stages=[SFT, RL])
    few = load(tmp_path, model=adapted({**OF_RL, "quantize_base": "int8"}), stages=[SFT, RL])
    before.run_directory.mkdir(parents=True)
    for began, changes in ((before, (plain, other, few)), (plain, (before,))):
        (before.run_directory / SETTINGS).write_bytes(msgspec.json.encode(began))
        check_resumable(began, None)
        for changed in changes:
            with pytest.raises(
                ConfigError, match=r"model\.adapter\S* was .* checkpoints of a whole model, and of each ad"
            ):
                check_resumable(changed, None)


@pytest.mark.slow
def test_a_stage_leaves_a_whole_model_and_its_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_stages.py").write_text(OWN_STAGE)
    recipe = load(tmp_path, model=adapted({"rank": 4, "stages": ["Repeat"]}), stages=[SFT, OWN])
    assert LocalRun(recipe, "recipe.yaml", (), console=Terminal()).run() == 0
    first, second = planned(recipe)
    base, left = (AutoModelForCausalLM.from_pretrained(one.directory).state_dict() for one in (first, second))
    assert not (first.directory / "adapter").exists()
    config = json.loads((second.directory / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(first.directory.resolve())
    changed = {name for name in base if not torch.equal(base[name], left[name])}
    assert changed == {name for name in base if name.removesuffix(".weight").endswith("_proj")}, "others are frozen"
    (second.directory / "model.safetensors").unlink()  # what the adapter makes of its base is the same model
    open_weights.__globals__["weight_files"].cache_clear()
    merged = open_weights(str(second.directory))
    assert merged is not None
    for name in changed - {name for name in changed if "experts" in name}:
        torch.testing.assert_close(merged(name), left[name], rtol=0, atol=1e-6)


def make_run(run: Path, model: ModelConfig) -> Path:
    """Make a run with one checkpoint, of random weights."""
    run.mkdir()
    recipe = msgspec.structs.replace(load_recipe("arithmetic.yaml"), model=model)
    (run / "config.yaml").write_text(dump_recipe(recipe))
    policy = open_backend("fsdp", model, OPTIMIZER, seed=1)
    for parameter in policy._parameters:  # type: ignore[attr-defined]
        local(parameter.detach()).normal_(std=0.1)
    saving = SnapshotWriter(Ranks.of(policy), run / "checkpoints" / "1" / "step_2", {"": policy}, None)
    saving.finish(lambda directory: seal(directory, state=LearnerState(incarnation=1, step=2)))
    return run


def test_an_adapter_is_exported_as_the_merged_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = saved_base(model_config("qwen3_moe", tied=False), tmp_path / "base")
    run = make_run(tmp_path / "run", with_adapter(base))
    code = answer(["export", str(run), "--out", str(tmp_path / "out"), "--json"])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert json.loads(said.out)["check"]["mean_difference"] < 1e-5
    exported, merged = open_weights(str(tmp_path / "out")), open_weights(str(run / "checkpoints" / "1" / "step_2"))
    assert exported is not None
    assert merged is not None
    assert exported.names == merged.names
    assert all(torch.equal(exported(name), merged(name)) for name in merged.names)
    assert not torch.equal(exported("model.layers.0.mlp.experts.0.up_proj.weight"), open_base(base.path))


def open_base(path: str) -> torch.Tensor:
    weights = open_weights(path)
    assert weights is not None
    return weights("model.layers.0.mlp.experts.0.up_proj.weight")


@pytest.mark.slow
def test_an_adapter_is_exported_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = saved_base(model_config("qwen3_moe", tied=False), tmp_path / "base")
    for name, model in (("run", with_adapter(base)), ("whole", base)):
        make_run(tmp_path / name, model)
    out, export = tmp_path / "out", ["export", "--adapter", "--json", "--out", str(tmp_path / "out")]
    assert answer([*export, str(tmp_path / "run")]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["check"]["mean_difference"] < 1e-5
    assert {path.name for path in out.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    (source,) = (tmp_path / "run").rglob("adapter_model.safetensors")
    ours, theirs = load_file(source), load_file(out / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert said["parameters"] == sum(tensor.numel() for tensor in ours.values())
    assert answer([*export, str(tmp_path / "run"), "--dtype", "bf16", "--force"]) == 0
    assert json.loads(capsys.readouterr().out)["dtype"] == "bfloat16"
    assert load_file(out / "adapter_model.safetensors")[next(iter(ours))].dtype == torch.bfloat16
    assert answer([*export, str(tmp_path / "whole"), "--force"]) != 0
    assert "holds no adapter: its run trained the whole model" in capsys.readouterr().err


@pytest.mark.slow
def test_an_adapter_of_a_quantized_base_is_exported_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = saved_base(model_config("qwen3_moe", tied=False), tmp_path / "base")
    run = make_run(tmp_path / "run", with_adapter(base, quantize_base="int8"))
    for more in ([], ["--adapter"]):
        assert answer(["export", str(run), "--out", str(tmp_path / "out"), "--json", "--force", *more]) == 0
        said = json.loads(capsys.readouterr().out)
        assert (said["quantized"], said["check"]["mean_difference"] < 1e-5) == ("int8", True)
    assert (tmp_path / "out" / "base.json").exists()
    assert answer(["export", str(run), "--out", str(tmp_path / "out"), "--force"]) == 0
    assert "trained beside a base in int8: its weights are those, made dense again." in capsys.readouterr().out
    exported = open_weights(str(tmp_path / "out"))
    assert exported is not None
    head, router = "lm_head.weight", "model.layers.0.mlp.gate.weight"
    plain = open_weights(base.path)
    assert plain is not None
    assert all(torch.equal(exported(name), plain(name)) for name in (head, router))


@pytest.mark.slow
def test_an_exported_adapter_that_computes_something_else_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", with_adapter(saved_base(model_config("qwen3"), tmp_path / "base")))

    def write_negated(tensors: Iterable[tuple[str, torch.Tensor]], directory: Path) -> None:
        write_tensors([(name, -tensor if "lora_A" in name else tensor) for name, tensor in tensors], directory)

    monkeypatch.setattr(export, "write_tensors", write_negated)
    assert answer(["export", str(run), "--adapter", "--out", str(tmp_path / "out")]) != 0
    assert "is not kept: the logprobs of" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
