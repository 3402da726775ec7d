"""Adapters are those of the library PEFT: it loads our files and computes the same, and we load its own.

`make test-peft` runs these with PEFT, in an environment of its own.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import tests.learner.megatron_adapter_rank as megatron_adapter_rank
from headway.learner.backends import open_backend
from headway.learner.backends.adapter import CONFIG, FOLDER, adapted_model, open_weights
from headway.learner.backends.fsdp.policy import FEW_EXPERTS
from headway.learner.batching.packing import concatenate, pack
from headway.learner.config import LayoutConfig, ModelConfig
from tests.learner.adapted import saved_base, with_adapter
from tests.learner.megatron_adapter_rank import Case
from tests.learner.test_fsdp import ordinary_logprobs
from tests.learner.tiny import OPTIMIZER, model_config, ratio_loss, sequences
from tests.learner.torchrun import run_ranks

peft: Any = pytest.importorskip("peft", reason="PEFT is not installed: make test-peft")

MODELS = {
    "dense": model_config("qwen3"),
    "few experts": model_config("qwen3_moe", num_experts=FEW_EXPERTS),
    "many experts": model_config("qwen3_moe", num_experts=9),
}
LENGTHS = [7, 12, 5, 20]
CHANGES: list[dict[str, Any]] = [{}, {"targets": ("q_proj", "down_proj"), "rank": 3}]


@pytest.mark.parametrize("changes", CHANGES, ids=["all", "some"])
@pytest.mark.parametrize("name", MODELS)
def test_peft_computes_from_our_files_what_we_compute(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    base = saved_base(MODELS[name], tmp_path / "base")
    backend = open_backend("fsdp", with_adapter(base, **changes), OPTIMIZER, seed=2)
    batches = pack(sequences(LENGTHS), 0, 1, 25)
    for _ in range(3):
        backend.step(batches, ratio_loss(batches, 10.0), 1.0, 5e-2)
    backend.save(tmp_path / "saved")
    untouched = AutoModelForCausalLM.from_pretrained(base.path).eval()
    model = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base.path), tmp_path / "saved" / FOLDER
    ).eval()
    for batch, got_T in zip(batches, backend.logprobs(batches, 1.0), strict=True):
        for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
            one = concatenate(sequences([end - start]))
            one.token_ids_T.copy_(batch.token_ids_T[start:end])
            torch.testing.assert_close(got_T[start:end], ordinary_logprobs(model, one, 1.0), rtol=0, atol=1e-6)
            assert (got_T[start:end] - ordinary_logprobs(untouched, one, 1.0)).abs().max() > 1e-2


@pytest.mark.parametrize("name", MODELS)
def test_we_read_what_peft_has_written(name: str, tmp_path: Path) -> None:
    base = saved_base(MODELS[name], tmp_path / "base")
    has_experts = name != "dense"
    model = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(base.path),
        peft.LoraConfig(
            r=4,
            lora_alpha=12,
            target_modules=["q_proj", "o_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if has_experts else None,
            task_type="CAUSAL_LM",
        ),
    )
    for key, parameter in model.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(parameter, std=0.3)
    for file in (tmp_path / "base").iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / "theirs").mkdir(exist_ok=True)
            (tmp_path / "theirs" / file.name).write_bytes(file.read_bytes())
    model.save_pretrained(tmp_path / "theirs" / FOLDER)
    assert (tmp_path / "theirs" / FOLDER / CONFIG).exists()
    ours = open_weights(str(tmp_path / "theirs"))
    assert ours is not None
    merged = open_backend("fsdp", replace(base, path=str(tmp_path / "theirs")), OPTIMIZER)
    adapted = adapted_model(ModelConfig(path=str(tmp_path / "theirs"))).adapter
    assert adapted is not None
    assert (adapted.rank, adapted.alpha) == (4, 12)
    for length in LENGTHS:
        one = concatenate(sequences([length]))
        expected_T = ordinary_logprobs(model.eval(), one, 1.0)
        torch.testing.assert_close(merged.logprobs([one], 1.0)[0], expected_T, rtol=0, atol=5e-6)


@pytest.mark.parametrize("name", ["dense", "many experts"])
def test_peft_reads_what_megatron_has_written(name: str, tmp_path: Path) -> None:
    """Split over two ranks, where both kinds of factors are split and joined."""
    base = saved_base(MODELS[name], tmp_path / "base")
    layout = LayoutConfig(tensor=2, **({} if name == "dense" else {"expert_tensor": 2}))
    case = Case(model=base.path, adapter=with_adapter(base).adapter, layout=layout)
    run_ranks(megatron_adapter_rank.__name__, 2, tmp_path, msgspec.json.encode(case).decode())
    adapted = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base.path), tmp_path / "0" / "checkpoint" / FOLDER
    )
    directory = tmp_path / "merged"
    adapted.merge_and_unload().save_pretrained(directory)
    theirs, ours = (
        load_file(path) for path in (directory / "model.safetensors", tmp_path / "0" / "merged.safetensors")
    )
    untouched = load_file(Path(base.path) / "model.safetensors")
    assert theirs.keys() == ours.keys()
    for key, tensor in theirs.items():
        torch.testing.assert_close(ours[key], tensor, rtol=0, atol=1e-6)
        assert torch.equal(tensor, untouched[key]) is not key.endswith("_proj.weight")
