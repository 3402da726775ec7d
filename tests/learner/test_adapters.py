# mypy: disable-error-code="attr-defined"
"""An adapter computes W x + s B A x, is trained alone, and leaves files that hold nothing else."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

import tests.learner.fsdp_rank as fsdp_rank
from headway.broker.errors import ConfigError
from headway.learner.backends import open_backend
from headway.learner.backends.adapter import adapted_model, open_weights
from headway.learner.backends.fsdp import backend as fsdp_backend
from headway.learner.backends.fsdp.policy import FEW_EXPERTS
from headway.learner.backends.fsdp.sharding import local
from headway.learner.batching.packing import pack
from headway.learner.config import ComputeConfig, LayoutConfig, LearnerConfig, ModelConfig
from headway.learner.models.lora import targets_of
from headway.learner.models.pretrained import load_config, load_model
from headway.learner.models.shape import adapter_parameters, shape_of
from headway.learner.planning.memory import PlannedModel, plan_memory
from tests.learner.adapted import ADAPTER, InTheOpen, saved_base, with_adapter
from tests.learner.fsdp_rank import Case
from tests.learner.test_fsdp import as_dict, ordinary_loss, results_of, trained_tokens
from tests.learner.tiny import OPTIMIZER, model_config, ratio_loss, sequences
from tests.learner.torchrun import run_ranks

LENGTHS = [7, 12, 5, 20, 3, 9]
MODELS = {
    "dense": model_config("qwen3"),
    "few experts": model_config("qwen3_moe", num_experts=FEW_EXPERTS),
    "many experts": model_config("qwen3_moe", num_experts=9),
}


def steps_in_the_open(model: ModelConfig, count: int) -> tuple[InTheOpen, list[list[float]]]:
    """Train A and B of an ordinary model with autograd, one sequence at a time; return (loss, norm) of each step."""
    assert model.adapter is not None
    open_model = InTheOpen(load_model(model, 3), model.adapter, 3)
    parameters = list(open_model.factors.values())
    betas = (OPTIMIZER.beta1, OPTIMIZER.beta2)
    optimizer = torch.optim.AdamW(
        parameters, 1e-2, betas=betas, eps=OPTIMIZER.epsilon, weight_decay=OPTIMIZER.weight_decay
    )
    results = []
    for seed in range(count):
        optimizer.zero_grad()
        loss = ordinary_loss(open_model, sequences(LENGTHS, seed=seed), 0.9)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, OPTIMIZER.max_grad_norm)
        optimizer.step()
        results.append([loss.item(), norm.item()])
    return open_model, results


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("budget", [1, 30, 1000])
def test_any_packing_trains_the_adapter_that_autograd_trains(name: str, budget: int) -> None:
    model = with_adapter(MODELS[name])
    open_model, expected = steps_in_the_open(model, 3)
    backend = open_backend("fsdp", model, OPTIMIZER, seed=3)
    for seed, (loss, norm) in enumerate(expected):
        given = sequences(LENGTHS, seed=seed)
        batches = pack(given, 0, 1, budget)
        got = backend.step(batches, ratio_loss(batches, trained_tokens(given)), 0.9, 1e-2)
        assert got[0] == pytest.approx(loss, abs=1e-5)
        assert got[1] == pytest.approx(norm, rel=1e-4)
    trained = {name: local(p.detach()) for name, p in backend._policy.model.named_parameters() if p.requires_grad}
    assert set(trained) == set(open_model.factors)
    for key, tensor in trained.items():
        torch.testing.assert_close(tensor, open_model.factors[key].detach(), rtol=0, atol=3e-4)
    assert max(float(tensor.abs().max()) for key, tensor in trained.items() if key.endswith("lora_B")) > 1e-2


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_makes_the_same_step(recompute: Any) -> None:
    model, given = with_adapter(MODELS["many experts"]), sequences(LENGTHS)
    batches = pack(given, 0, 1, 30)
    kept, again = (
        open_backend("fsdp", model, OPTIMIZER, seed=3, compute=ComputeConfig(recompute=how))
        for how in ("none", recompute)
    )
    results = [backend.step(batches, ratio_loss(batches, 9.0), 0.9, 1e-2)[:2] for backend in (kept, again)]
    assert results[0] == pytest.approx(results[1], rel=1e-6)


def test_a_fresh_adapter_changes_nothing() -> None:
    whole = open_backend("fsdp", MODELS["many experts"], OPTIMIZER, seed=3)
    adapted = open_backend("fsdp", with_adapter(MODELS["many experts"]), OPTIMIZER, seed=3)
    mine, theirs = as_dict(adapted), as_dict(whole)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_holds_an_adapter_that_reads_as_the_merged_model(dtype: Any, tmp_path: Path) -> None:
    base = saved_base(replace(MODELS["many experts"], dtype=dtype), tmp_path / "base")
    backend = open_backend("fsdp", with_adapter(base), OPTIMIZER, seed=3)
    batches = pack(sequences(LENGTHS), 0, 1, 30)
    for _ in range(2):
        backend.step(batches, ratio_loss(batches, 9.0), 0.9, 1e-2)
    backend.save(tmp_path / "saved")
    assert not list((tmp_path / "saved").glob("*.safetensors"))
    held = sum(p.numel() for p in backend._parameters)
    files = load_file(tmp_path / "saved" / "adapter" / "adapter_model.safetensors")
    assert sum(tensor.numel() for tensor in files.values()) == held
    state = FileSystemReader(tmp_path / "saved" / "training_state").read_metadata().state_dict_metadata
    assert all("lora_" in name or "inv_freq" in name for name in state)
    assert sum("lora_" in name for name in state) == 4 * len(files), "each master, its moments and step"
    merged, published = open_weights(str(tmp_path / "saved")), as_dict(backend)
    assert merged is not None
    assert merged.names >= set(published)
    atol = 1e-6 if dtype == "float32" else 0.01  # the base's files are in float32, published weights are rounded twice
    for name, tensor in published.items():
        torch.testing.assert_close(merged(name).float(), tensor.float(), rtol=0, atol=atol)
    assert not torch.equal(merged("model.layers.0.mlp.experts.0.up_proj.weight"), load(base, "0.up_proj"))
    resumed = open_backend("fsdp", adapted_model(ModelConfig(path=str(tmp_path / "saved"), dtype=dtype)), OPTIMIZER)
    resumed.load(tmp_path / "saved")
    results = [one.step(batches, ratio_loss(batches, 9.0), 0.9, 1e-2) for one in (backend, resumed)]
    assert results[0] == results[1]
    assert all(torch.equal(tensor, as_dict(resumed)[name]) for name, tensor in as_dict(backend).items())


def mean_difference(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    """Return that of the logprobs of all tokens."""
    return float((torch.cat(first) - torch.cat(second)).abs().mean())


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_logprobs_are_those_of_the_merged_model(name: str, tmp_path: Path) -> None:
    """In float32 they are to the last bits of a logprob. bfloat16 keeps 8 bits of a weight, and merged ones are rounded
    as a sum where unmerged ones are rounded apart. So they differ as much as each does from the same model in float32:
    by a mean of 0.004 to 0.014 here, where the adapter changes logprobs by 0.6."""
    base = saved_base(MODELS[name], tmp_path / "base")
    adapted = open_backend("fsdp", with_adapter(base), OPTIMIZER, seed=3)
    batches = pack(sequences(LENGTHS), 0, 1, 30)
    for _ in range(3):
        adapted.step(batches, ratio_loss(batches, 9.0), 0.9, 0.1)
    adapted.save(tmp_path / "saved")
    saved = ModelConfig(path=str(tmp_path / "saved"))

    def logprobs(model: ModelConfig) -> list[torch.Tensor]:
        backend = open_backend("fsdp", model, OPTIMIZER, seed=3)
        if model.adapter:
            backend.load(tmp_path / "saved")
        return backend.logprobs(batches, 1.0)

    merged, untrained = logprobs(saved), logprobs(base)
    unmerged = logprobs(adapted_model(saved))
    assert max(float((a - b).abs().max()) for a, b in zip(unmerged, merged, strict=True)) < 2e-5
    assert mean_difference(merged, untrained) > 0.1
    low, low_merged = (logprobs(replace(one, dtype="bfloat16")) for one in (adapted_model(saved), saved))
    for other in (merged, low_merged):
        assert mean_difference(low, other) < 0.03


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["dense", "many experts"])
def test_without_its_adapter_a_model_computes_what_its_base_does_and_then_goes_on(name: str, dtype: Any) -> None:
    model = replace(MODELS[name], dtype=dtype)
    adapted, base = (open_backend("fsdp", one, OPTIMIZER, seed=3) for one in (with_adapter(model), model))
    batches = pack(sequences(LENGTHS), 0, 1, 1000)
    for _ in range(2):
        adapted.step(batches, ratio_loss(batches, 9.0), 0.9, 0.1)
    (before,) = adapted.logprobs(batches, 1.0)
    with adapted.without_adapter():
        (without,) = adapted.logprobs(batches, 1.0)
    (after,) = adapted.logprobs(batches, 1.0)
    assert torch.equal(after, before)
    assert mean_difference([without], [before]) > 0.1
    assert mean_difference([without], base.logprobs(batches, 1.0)) < (1e-5 if dtype == "float32" else 0.02)


def load(base: ModelConfig, expert: str) -> torch.Tensor:
    weights = open_weights(base.path)
    assert weights is not None
    return weights(f"model.layers.0.mlp.experts.{expert}.weight")


def test_a_base_that_is_gone_is_told(tmp_path: Path) -> None:
    base = saved_base(MODELS["dense"], tmp_path / "base")
    open_backend("fsdp", with_adapter(base), OPTIMIZER).save(tmp_path / "saved")
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match=r"is not at '.*base' any more"):
        open_weights(str(tmp_path / "saved"))


RANKS = [
    Case(architecture="qwen3", adapter=ADAPTER),
    Case(architecture="qwen3_moe", adapter=replace(ADAPTER, rank=3), is_large=True),
    Case(architecture="qwen3_moe", adapter=ADAPTER, layout=LayoutConfig(context=2)),
    Case(architecture="qwen3_moe", adapter=ADAPTER, checkpoint="alone"),
    Case(architecture="qwen3", adapter=replace(ADAPTER, quantize_base="int8")),
]


@pytest.mark.slow
def test_two_ranks_equal_one_and_each_resumes_from_the_other(tmp_path: Path) -> None:
    begun = open_backend("fsdp", replace(model_config("qwen3_moe"), adapter=ADAPTER), OPTIMIZER, seed=3)
    fsdp_rank.step(begun, 0)
    begun.save(tmp_path / "alone")
    cases = [replace(case, checkpoint=case.checkpoint and str(tmp_path / case.checkpoint)) for case in RANKS]
    run_ranks(fsdp_rank.__name__, 2, tmp_path, *[msgspec.json.encode(case).decode() for case in cases])
    for number, case in enumerate(cases):
        model = replace(model_config(case.architecture), adapter=case.adapter)
        alone = open_backend("fsdp", model, OPTIMIZER, seed=3)
        steps = [fsdp_rank.step(alone, step) for step in range(len(fsdp_rank.LENGTHS))]
        results = steps[1:] if case.checkpoint else steps
        found = results_of(tmp_path / str(number) / "rank_0.json")
        assert [one.loss for one in found] == pytest.approx([one.loss for one in results], abs=1e-5)
        assert [one.norm for one in found] == pytest.approx([one.norm for one in results], rel=1e-4)
        tensors = load_file(tmp_path / str(number) / "tensors.safetensors")
        for name, tensor in alone.named_tensors():
            torch.testing.assert_close(tensor, tensors[name], rtol=0, atol=3e-5)
        other = open_backend("fsdp", model, OPTIMIZER, seed=3)
        other.load(tmp_path / str(number) / "checkpoint")
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in other.named_tensors())


def test_dropout_is_on_in_updates_alone() -> None:
    model = with_adapter(MODELS["dense"], dropout=0.5)
    batches = pack(sequences(LENGTHS), 0, 1, 1000)
    backend = open_backend("fsdp", model, OPTIMIZER, seed=3)
    torch.manual_seed(0)
    norms = [backend.step(batches, ratio_loss(batches, 9.0), 0.9, 0.0)[1] for _ in range(2)]
    assert norms[0] != norms[1]
    first, again = (backend.logprobs(batches, 1.0)[0] for _ in range(2))
    assert torch.equal(first, again)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"targets": ("q_prj",)}, "has no 'q_prj' .* It has q_proj, k_proj, v_proj, o_proj, gate_up_proj, down_proj"),
        ({"targets": ("lm_head",)}, "has no 'lm_head'"),
        ({"dropout": 0.1}, "the adapter changes experts, which PEFT's form has without dropout"),
    ],
)
def test_what_cannot_be_adapted_is_told(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        open_backend("fsdp", with_adapter(MODELS["many experts"], **changes), OPTIMIZER)


def test_dropout_and_recomputation_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="recompute=full computes activations again"):
        open_backend(
            "fsdp", with_adapter(MODELS["dense"], dropout=0.1), OPTIMIZER, compute=ComputeConfig(recompute="full")
        )


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        (("q_proj",), {"self_attn.q_proj"}),
        (("experts.down_proj",), {"mlp.experts.down_proj"}),
        (("layers.1.self_attn.o_proj",), {"self_attn.o_proj"}),
    ],
)
def test_a_target_is_the_end_of_a_name(targets: tuple[str, ...], names: set[str]) -> None:
    model = load_model(MODELS["many experts"])
    found = targets_of(model, replace(ADAPTER, targets=targets))
    assert {target.name.split(".", 3)[3] for target in found} == names
    assert len(found) == (1 if targets[0].startswith("layers") else 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_an_opened_adapter_holds_its_plan(name: str, dtype: Any) -> None:
    model = with_adapter(replace(MODELS[name], dtype=dtype))
    backend = open_backend("fsdp", model, OPTIMIZER)
    config = load_config(model)
    assert model.adapter is not None
    planned = PlannedModel(
        shape=shape_of(config),
        learner=LearnerConfig(),
        dtype=dtype,
        adapter=adapter_parameters(config, model.adapter),
    )
    (held,) = plan_memory(planned)
    (whole,) = plan_memory(replace_plan(planned, adapter=()))
    assert held.parameters == sum(p.nbytes for p in backend._module.parameters())
    trained = sum(p.numel() for p in backend._parameters)
    assert (held.gradients, held.optimizer) == (4 * trained, 8 * trained)
    assert held.activations == whole.activations
    assert held.total < whole.total


@pytest.mark.parametrize("name", MODELS)
def test_the_base_of_an_adapter_is_computed_with_in_its_place_as_planned(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsdp_backend, "stays_whole", lambda *_: True)  # as on a GPU
    model = with_adapter(replace(MODELS[name], dtype="bfloat16"))
    backend, config = open_backend("fsdp", model, OPTIMIZER), load_config(model)
    assert model.adapter is not None
    backend.logprobs(pack(sequences([7, 12]), 0, 1, 30), 1.0)
    parameters = adapter_parameters(config, model.adapter)
    on_gpu = LearnerConfig(device="cuda")
    planned = PlannedModel(shape=shape_of(config), learner=on_gpu, dtype="bfloat16", adapter=parameters)
    (held,) = plan_memory(planned)
    largest = max(sum(one.size for one in parameters if one.layer == layer) for layer in range(planned.shape.layers))
    copies = sum(copy.numel() * copy.element_size() for copy in backend._rounded.copies)
    assert held.gathered == copies + 6 * largest
    (sharded,) = plan_memory(replace_plan(planned, learner=LearnerConfig()))
    assert sharded.gathered == held.gathered + 2 * planned.shape.num_parameters, "FSDP gathers the base, too"


def replace_plan(planned: PlannedModel, **changes: Any) -> PlannedModel:
    fields = {name: getattr(planned, name) for name in PlannedModel.__dataclass_fields__}
    return PlannedModel(**(fields | changes))
