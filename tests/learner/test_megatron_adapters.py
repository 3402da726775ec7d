"""Adapters on the megatron backend are those of the fsdp backend, however the model is split."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

import tests.learner.megatron_adapter_rank as megatron_adapter_rank
from headway.learner.backends import open_backend
from headway.learner.backends.adapter import open_weights
from headway.learner.batching.packing import pack
from headway.learner.config import ComputeConfig, LayoutConfig, LearnerConfig, ModelConfig
from headway.learner.models.pretrained import load_config
from headway.learner.models.shape import adapter_parameters, shape_of
from headway.learner.planning.memory import PlannedModel, plan_memory
from tests.learner import fsdp_rank
from tests.learner.adapted import ADAPTER, saved_base
from tests.learner.megatron_adapter_rank import Case, Outcome
from tests.learner.test_megatron import write_checkpoint
from tests.learner.tiny import OPTIMIZER, model_config, sequences
from tests.learner.torchrun import run_ranks

RANKS = 2
DENSE, BIASED, EXPERTS = "qwen3", "qwen2", "qwen3_moe"
CASES = {
    "dense over tensor": Case(model=BIASED, adapter=ADAPTER, layout=LayoutConfig(tensor=2), foreign="whole"),
    "experts": Case(model=EXPERTS, adapter=replace(ADAPTER, rank=3)),
    "experts over ranks, resumed from whole ones": Case(
        model=EXPERTS,
        adapter=replace(ADAPTER, rank=3),
        layout=LayoutConfig(tensor=2, expert=2),
        checkpoint="1/first",
    ),
    "experts over tensor": Case(
        model=EXPERTS,
        adapter=ADAPTER,
        layout=LayoutConfig(tensor=2, expert_tensor=2),
        compute=ComputeConfig(recompute="selective"),
    ),
    "a stage without an adapter": Case(
        model=DENSE,
        adapter=replace(ADAPTER, targets=("layers.1.self_attn.k_proj", "layers.1.mlp.up_proj")),
        layout=LayoutConfig(pipeline=2),
        compute=ComputeConfig(recompute="full"),
    ),
}
"""Each is compared with one rank of the fsdp backend. Models are names of directories, and checkpoints lie in those of
other cases."""
LOW = Case(model=DENSE, adapter=replace(ADAPTER, dropout=0.5), dtype="bfloat16", layout=LayoutConfig(context=2))
WHOLE = Case(model=BIASED, adapter=None, foreign="0/checkpoint")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory in which all cases have run: they share the start of their ranks."""
    root = tmp_path_factory.mktemp("adapters")
    for name in (DENSE, EXPERTS, BIASED):
        saved_base(model_config(name), root / name)
    write_checkpoint(model_config(BIASED), root / "whole")
    given = [msgspec.json.encode(_in(root, case)).decode() for case in (*CASES.values(), LOW, WHOLE)]
    run_ranks(megatron_adapter_rank.__name__, RANKS, root, *given)
    return root


def _in(root: Path, case: Case) -> Case:
    paths = {key: str(root / path) for key in ("model", "checkpoint", "foreign") if (path := getattr(case, key))}
    return msgspec.structs.replace(case, **paths)


def outcomes(directory: Path) -> list[Outcome]:
    files = [directory / f"rank_{rank}.json" for rank in range(RANKS)]
    return [msgspec.json.decode(file.read_bytes(), type=Outcome) for file in files]


@pytest.mark.parametrize("name", CASES)
def test_every_layout_trains_the_adapter_that_fsdp_trains(name: str, root: Path) -> None:
    case, directory = CASES[name], root / str(list(CASES).index(name))
    alone: Any = open_backend("fsdp", _model(root, case), OPTIMIZER, seed=3)
    expected = [fsdp_rank.step(alone, number) for number in range(len(fsdp_rank.LENGTHS))]
    found = outcomes(directory)[0].steps
    for one, its in zip(expected[-len(found) :], found, strict=True):
        assert its.loss == pytest.approx(one.loss, abs=1e-7)
        assert its.norm == pytest.approx(one.norm, rel=1e-6)
    trained = ("merged", alone.named_tensors, 5e-6), ("factors", alone.factor_tensors, 5e-6)
    for kind, tensors, atol in (*trained, ("base", alone.base_tensors, 0.0)):
        mine, theirs = load_file(directory / f"{kind}.safetensors"), dict(tensors())
        assert mine.keys() == theirs.keys()
        for key, tensor in theirs.items():
            torch.testing.assert_close(mine[key], tensor, rtol=0, atol=atol)
    with alone.without_adapter():
        (without,) = alone.logprobs(pack(sequences([7, 12]), 0, 1, 30), 1.0)
    assert outcomes(directory)[0].without == pytest.approx(without.tolist(), abs=1e-5)
    assert outcomes(directory)[0].is_certain


def _model(root: Path, case: Case) -> ModelConfig:
    return ModelConfig(path=str(root / case.model), dtype=case.dtype, adapter=case.adapter)


@pytest.mark.parametrize("name", ["dense over tensor", "experts over ranks, resumed from whole ones"])
def test_a_checkpoint_holds_the_adapter_as_peft_has_it(name: str, root: Path, tmp_path: Path) -> None:
    case, directory = CASES[name], root / str(list(CASES).index(name)) / "checkpoint"
    alone = open_backend("fsdp", _model(root, case), OPTIMIZER, seed=3)
    for number in range(len(fsdp_rank.LENGTHS)):
        fsdp_rank.step(alone, number)
    alone.save(tmp_path / "fsdp")
    mine, theirs = directory / "adapter", tmp_path / "fsdp" / "adapter"
    assert (mine / "adapter_config.json").read_bytes() == (theirs / "adapter_config.json").read_bytes()
    ours, expected = (load_file(folder / "adapter_model.safetensors") for folder in (mine, theirs))
    assert ours.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(ours[key], tensor, rtol=0, atol=5e-6)
    assert not list(directory.glob("*.safetensors"))
    state = [key for file in (directory / "param").glob("*.safetensors") for key in load_file(file)]
    assert all("lora_" in key for key in state)
    merged, published = open_weights(str(directory)), load_file(directory.parent / "merged.safetensors")
    assert merged is not None
    for key, tensor in published.items():
        torch.testing.assert_close(merged(key), tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize("number", range(len(CASES) + 1))
def test_ranks_hold_their_plan(number: int, root: Path) -> None:
    """The base has neither gradients nor moments."""
    case = [*CASES.values(), LOW][number]
    model = _model(root, case)
    assert model.adapter is not None
    config = load_config(model)
    planned = PlannedModel(
        shape=shape_of(config),
        learner=LearnerConfig(backend="megatron", processes=RANKS, layout=case.layout, compute=case.compute),
        dtype=case.dtype,
        adapter=adapter_parameters(config, model.adapter),
    )
    held, expected = outcomes(root / str(number)), sorted(plan_memory(planned), key=lambda one: one.rank)
    assert [(one.parameters, one.gradients) for one in held] == [(one.parameters, one.gradients) for one in expected]
    assert sum(one.optimizer for one in held) == sum(one.optimizer for one in expected)


def test_dropout_is_on_in_updates_alone(root: Path) -> None:
    dropped = outcomes(root / str(len(CASES)))[0]
    plain = open_backend("fsdp", replace(_model(root, LOW), adapter=ADAPTER), OPTIMIZER, seed=3)
    expected = fsdp_rank.step(plain, 0)
    assert dropped.steps[0].loss == pytest.approx(expected.loss, rel=0.01), "B is 0 at first"
    assert dropped.steps[0].norm != pytest.approx(expected.norm, rel=0.05)
    assert dropped.is_certain


def test_a_checkpoint_of_the_other_kind_is_refused(root: Path) -> None:
    adapted, whole = outcomes(root / "0")[0], outcomes(root / str(len(CASES) + 1))[0]
    for refusal in (adapted.refusal, whole.refusal):
        assert "does not hold a training state that fits this model" in refusal
        assert "Resume with the `model` section and the backend that the checkpoint was written with." in refusal
