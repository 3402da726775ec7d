"""The memory plan of ranks agrees with published sizes and with the bytes that the backends really hold."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

import headway.learner.models.attention
from headway.broker.errors import ConfigError
from headway.learner.backends import open_backend
from headway.learner.backends.base import Teacher
from headway.learner.batching.packing import pack
from headway.learner.batching.tree import build_tree, labels_of
from headway.learner.config import AdapterConfig, ComputeConfig, LayoutConfig, LearnerConfig
from headway.learner.models.attention import PackedLayout, varlen_attention
from headway.learner.models.pretrained import load_config
from headway.learner.models.shape import adapter_parameters, shape_of
from headway.learner.planning.memory import (
    PlannedModel,
    RankMemory,
    plan_distillation,
    plan_memory,
    scorer_bytes,
    with_score_head,
)
from headway.rollout_workers.config import ScorersConfig
from headway.rollout_workers.scorers.runtimes import open_runner
from tests.learner.tiny import OPTIMIZER, model_config, sequences

QWEN3_8B = Qwen3Config(
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
)
QWEN3_30B_A3B = Qwen3MoeConfig(
    hidden_size=2048,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    moe_intermediate_size=768,
    num_experts=128,
    num_experts_per_tok=8,
    vocab_size=151936,
)
LLAMA_8B = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
)
SIZES = {8_190_735_360: QWEN3_8B, 30_532_122_624: QWEN3_30B_A3B, 8_030_261_248: LLAMA_8B}
"""Models by their published number of parameters."""

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 20,
}
TINY_MOE = Qwen3MoeConfig(**TINY, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)


def planned(
    config: PretrainedConfig, backend: str = "fsdp", processes: int = 1, dtype: str = "bfloat16", **layout: int
) -> PlannedModel:
    learner = LearnerConfig(backend=backend, processes=processes, layout=LayoutConfig(**layout))
    return PlannedModel(shape=shape_of(config), learner=learner, dtype=dtype)  # type: ignore[arg-type]


def total(ranks: list[RankMemory], name: str) -> int:
    return sum(getattr(held, name) for held in ranks)


def with_learner(plan: PlannedModel, **changes: Any) -> PlannedModel:
    fields = {name: getattr(plan.learner, name) for name in plan.learner.__struct_fields__}
    return replace(plan, learner=LearnerConfig(**(fields | changes)))


@pytest.mark.parametrize(("published", "config"), SIZES.items(), ids=lambda value: getattr(value, "model_type", ""))
def test_every_parameter_of_a_published_model_is_counted(published: int, config: PretrainedConfig) -> None:
    ranks = plan_memory(planned(config, processes=8))
    assert total(ranks, "parameters") == total(ranks, "gradients") == 4 * published
    assert total(ranks, "optimizer") == 8 * published
    (only,) = plan_memory(planned(config, "megatron"))
    assert (only.parameters, only.gradients, only.optimizer) == (2 * published, 4 * published, 12 * published)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe", "llama"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("processes", [1, 3])
def test_fsdp_holds_what_transformers_would_build(architecture: str, tied: bool, processes: int) -> None:
    config = load_config(model_config(architecture, tied=tied))
    numel = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    ranks = plan_memory(planned(config, processes=processes))
    assert total(ranks, "parameters") == 4 * numel
    assert [held.total for held in ranks] == sorted((held.total for held in ranks), reverse=True)


def test_fsdp_backend_holds_its_plan() -> None:
    model = model_config("qwen3_moe")
    backend = open_backend("fsdp", model, OPTIMIZER)
    numel = sum(p.numel() for p in backend._parameters)  # type: ignore[attr-defined]
    (held,) = plan_memory(planned(load_config(model)))
    assert (held.parameters, held.gradients, held.optimizer) == (4 * numel, 4 * numel, 8 * numel)


def test_an_opened_teacher_holds_no_optimizer_as_planned() -> None:
    model = model_config("qwen3_moe")
    teacher = open_backend("fsdp", model, OPTIMIZER)
    assert isinstance(teacher, Teacher)
    teacher.likeliest(pack(sequences([9, 5]), 0, 1, 16), 3)
    (asked,) = plan_memory(replace(planned(load_config(model)), is_trained=False))
    assert (asked.gradients, asked.optimizer) == (0, 0)
    assert asked.parameters == sum(tensor.nbytes for tensor in teacher._held())  # type: ignore[attr-defined]


@pytest.mark.parametrize("tied", [True, False])
def test_an_opened_reward_model_holds_its_plan(tied: bool) -> None:
    model = model_config("qwen3", tied=tied)
    scores = open_backend("fsdp", model, OPTIMIZER, head="score")
    numel = sum(p.numel() for p in scores._parameters)  # type: ignore[attr-defined]
    (held,) = plan_memory(with_score_head(planned(load_config(model))))
    assert (held.parameters, held.gradients, held.optimizer, held.head) == (4 * numel, 4 * numel, 8 * numel, 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_opened_scorers_hold_their_plan(tied: bool, dtype: Any, tmp_path: Path) -> None:
    config, model = ScorersConfig(dtype=dtype), load_config(model_config("qwen3", tied=tied))
    model.num_labels = 1
    for kind, opener in (("teacher", AutoModelForCausalLM), ("reward_model", AutoModelForSequenceClassification)):
        opener.from_config(model).save_pretrained(tmp_path / kind)
        runner = open_runner(kind, str(tmp_path / kind), config, key="path")
        held = sum(parameter.nbytes for parameter in runner._model.parameters())  # type: ignore[attr-defined]
        assert scorer_bytes(shape_of(model), dtype, 0, has_vocabulary=kind == "teacher") == held


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_a_teacher_is_beside_a_student_without_gradients_and_moments(backend: str) -> None:
    student, teacher = planned(LLAMA_8B, backend, 8), planned(QWEN3_30B_A3B, backend, 8)
    (ours, *_), (theirs, *_) = plan_memory(student), plan_memory(teacher)
    (both, *_) = plan_distillation(student, teacher.shape)
    masters = {"fsdp": 0, "megatron": 1}[backend]  # of three parts of megatron's state, the two others are moments
    assert (both.parameters, both.gradients) == (ours.parameters, 0)
    assert both.optimizer == masters * ours.optimizer // 3
    assert both.other_models == theirs.parameters + masters * theirs.optimizer // 3
    assert 0 < both.activations < theirs.activations
    assert 0 < both.head < theirs.head
    assert both.gathered <= theirs.gathered


def test_megatron_ranks_split_what_their_layout_says() -> None:
    """Two stages have two tensor-parallel ranks each, which split the experts too, and two replicas."""
    shape = planned(TINY_MOE).shape
    ranks = plan_memory(planned(TINY_MOE, "megatron", 8, tensor=2, pipeline=2, expert=2))
    attention = 32 * 32 + 2 * 16 * 32 + 32 * 32
    whole = 2 * 32 + 2 * 8 + 4 * 32
    experts = 4 * 3 * 24 * 32
    first = 10 * 32 + 2 * (attention // 2 + whole + experts // 2)
    last = first + 32
    held = {one.rank: one for one in ranks}
    assert [held[rank].parameters for rank in range(8)] == [2 * first] * 4 + [2 * last] * 4
    assert [held[rank].gradients for rank in range(8)] == [4 * first] * 4 + [4 * last] * 4
    assert held[0].optimizer == 12 * first // 2
    copied = 4 * whole + 32  # both tensor-parallel ranks hold a copy
    assert total(ranks, "optimizer") == 12 * (shape.num_parameters + copied)


def test_megatron_replicas_share_the_optimizer_and_nothing_else() -> None:
    ranks = plan_memory(planned(TINY_MOE, "megatron", 3))
    numel = planned(TINY_MOE).shape.num_parameters
    assert numel % 3, "some ranks hold an element more"
    assert {held.parameters for held in ranks} == {2 * numel}
    assert total(ranks, "optimizer") == 12 * numel


def test_megatron_masters_are_the_parameters_in_fp32() -> None:
    (held,) = plan_memory(planned(TINY_MOE, "megatron", dtype="float32"))
    numel = planned(TINY_MOE).shape.num_parameters
    assert (held.parameters, held.gradients, held.optimizer) == (4 * numel, 4 * numel, 8 * numel)


def test_a_tied_embedding_stands_in_the_first_and_the_last_stage() -> None:
    tied = Qwen3Config(**TINY, tie_word_embeddings=True)
    ranks = plan_memory(planned(tied, "megatron", 2, pipeline=2))
    assert total(ranks, "parameters") == 2 * (planned(tied).shape.num_parameters + 20 * 32)


def test_the_vocabulary_is_padded_for_tensor_parallel_ranks() -> None:
    odd = Qwen3Config(**(TINY | {"vocab_size": 19}), tie_word_embeddings=True)
    even = Qwen3Config(**TINY, tie_word_embeddings=True)
    of_odd, of_even = (plan_memory(planned(config, "megatron", 2, tensor=2)) for config in (odd, even))
    assert of_odd[0].parameters == of_even[0].parameters


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_recomputing_more_keeps_fewer_activations(backend: str) -> None:
    plan = planned(QWEN3_8B, backend, 2)
    kept = [
        plan_memory(with_learner(plan, compute=ComputeConfig(recompute=how)))[0].activations
        for how in ("none", "selective", "full")
    ]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > kept[1] > kept[2]


def test_activations_follow_the_formula() -> None:
    """Dense: norms 4 W and q, k before theirs; 2 of q, k, v, output; 4 F. Full: inputs, and one layer made again."""
    plan = planned(QWEN3_8B)
    tokens = plan.learner.micro_batch_tokens
    layer = 4 * 4096 + (4096 + 1024) + 2 * (4096 + 1024) + 4 * 12288
    assert plan_memory(plan)[0].activations == 2 * tokens * 36 * layer
    full = with_learner(plan, compute=ComputeConfig(recompute="full"))
    assert plan_memory(full)[0].activations == 2 * tokens * (36 * 4096 + layer - 4096)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_rows_that_share_tokens_hold_a_copy_of_keys_and_values_for_each_sequence(backend: str, recompute: Any) -> None:
    """16 copies of a token's key and value count as a token. Without grouped heads they are more: 11 make one."""
    wide = Qwen3Config(**(TINY | {"num_key_value_heads": 16, "num_attention_heads": 16}))
    plan = with_learner(planned(wide, backend), compute=ComputeConfig(recompute=recompute))
    (alone,), (shared,) = plan_memory(plan), plan_memory(replace(plan, sharing=17))
    tokens = plan.learner.micro_batch_tokens // 2
    layer = 4 * 32 + 2 * 128 + 4 * 128 + 4 * 48
    copies, layers = 16 * 2 * 128, {"none": 4, "full": 1}
    layers["selective"] = layers["none" if backend == "megatron" else "full"]
    of_tokens = alone.activations // 2
    indices = 8 * tokens * (2 * 17 + 1)
    assert shared.activations == of_tokens + 2 * tokens * copies * layers[recompute] + indices
    assert alone.activations == 2 * of_tokens
    if recompute == "none":
        assert alone.activations == 2 * 2 * tokens * 4 * layer


def test_shared_tokens_of_grouped_heads_take_no_more_than_separate_ones() -> None:
    plan = planned(QWEN3_8B)
    assert plan_memory(replace(plan, sharing=16)) == plan_memory(plan)


def test_a_row_that_shares_tokens_keeps_what_the_plan_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention keeps queries, and a copy of key and value for each place of a path, and indices of all places."""
    monkeypatch.setattr(
        headway.learner.models.attention, "varlen_attn", lambda q, k, v, *_, **__: Kernel.apply(q, k, v)
    )
    prompt, ends = [*range(40)], ([1, 2], [3, 4], [5, 6])
    tree = build_tree([labels_of(np.array([*prompt, *end], np.int32)) for end in ends])
    assert tree is not None
    q, k, v = (torch.zeros(tree.num_positions, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    layout = PackedLayout.of_paths(tree.cu_runs, tree.cu_paths, tree.paths_P, varlen=True)
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        varlen_attention(q, k, v, layout, 1.0)
    positions, path = tree.num_positions, len(tree.paths_P)
    assert path == 3 * 41
    assert sum(kept.values()) == 4 * 8 * (4 * positions + 2 * 2 * path) + 8 * (path + positions)


class Kernel(torch.autograd.Function):
    """A stand-in for a fused kernel, which keeps what it is given."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(q, k, v)
        return q.clone()


def test_activations_are_split_over_tensor_and_context_ranks() -> None:
    alone = plan_memory(planned(QWEN3_8B, "megatron"))[0].activations
    assert plan_memory(planned(QWEN3_8B, "megatron", 4, tensor=2, context=2))[0].activations == alone // 4
    assert plan_memory(planned(QWEN3_8B, "fsdp", 4, context=4))[0].activations == alone // 4


def test_early_stages_hold_more_micro_batches() -> None:
    """In one forward, one backward the first of four stages holds four micro-batches of a quarter of the layers."""
    alone = plan_memory(planned(QWEN3_8B, "megatron"))[0].activations
    ranks = sorted(plan_memory(planned(QWEN3_8B, "megatron", 4, pipeline=4)), key=lambda held: held.rank)
    assert [held.activations for held in ranks] == [alone * n // 4 for n in (4, 3, 2, 1)]
    twice = sorted(plan_memory(planned(QWEN3_8B, "megatron", 2, pipeline=2, virtual_pipeline=2)), key=lambda h: h.rank)
    assert [held.activations for held in twice] == [alone * n // 4 for n in (5, 3)]


def test_moments_in_cpu_memory_are_not_on_the_device() -> None:
    offloaded = with_learner(planned(QWEN3_8B), compute=ComputeConfig(offload_optimizer=True))
    assert plan_memory(offloaded)[0].optimizer == 0


def test_logits_are_kept_where_they_take_no_more_than_a_share_of_the_device() -> None:
    small = with_learner(
        planned(Qwen3Config(**TINY)), device="cuda", compute=ComputeConfig(cuda_graphs="never", recompute="none")
    )
    logits_bytes = 2 * small.row_tokens * small.vocabulary_rows
    unknown, enough, less = (
        plan_memory(replace(small, device_bytes=device_bytes))[0].head
        for device_bytes in (None, 8 * logits_bytes, 8 * logits_bytes - 1)
    )
    assert unknown == enough == less + logits_bytes


def test_a_large_gpu_keeps_the_logits_of_longer_rows() -> None:
    long = with_learner(
        planned(QWEN3_8B),
        device="cuda",
        micro_batch_tokens=32768,
        compute=ComputeConfig(cuda_graphs="never", recompute="none"),
    )
    unknown, large, small = (
        plan_memory(replace(long, device_bytes=device_bytes))[0].head
        for device_bytes in (None, 141 * 10**9, 80 * 10**9)
    )
    assert unknown == large == small + 2 * long.row_tokens * long.vocabulary_rows


def test_recorded_kernels_have_activations_of_their_own() -> None:
    small = planned(Qwen3Config(**TINY))
    launched = plan_memory(with_learner(small, device="cuda", compute=ComputeConfig(cuda_graphs="never")))[0]
    replayed = plan_memory(with_learner(small, device="cuda", compute=ComputeConfig(cuda_graphs="auto")))[0]
    always = plan_memory(with_learner(small, device="cuda", compute=ComputeConfig(cuda_graphs="always")))[0]
    assert replayed.activations == always.activations == 2 * launched.activations
    kept = 2 * small.row_tokens * small.vocabulary_rows
    assert (always.head, replayed.head) == (2 * launched.head, 2 * (launched.head - kept))
    adapted = replace(small, adapter=adapter_parameters(Qwen3Config(**TINY), AdapterConfig(rank=4)))
    held = plan_memory(with_learner(adapted, device="cuda", compute=ComputeConfig(cuda_graphs="always")))[0]
    assert held.activations == replayed.activations
    assert held.gathered == 2 * 2 * sum(one.size for one in adapted.adapter) < replayed.gathered, "the base is no copy"
    auto = ComputeConfig(cuda_graphs="auto")
    for launches in (planned(QWEN3_8B), planned(TINY_MOE), planned(Qwen3Config(**TINY), processes=2)):
        one, other = (plan_memory(with_learner(launches, device="cuda", compute=c))[0] for c in (auto, ComputeConfig()))
        assert one.activations == other.activations


def test_other_models_are_counted() -> None:
    plan = planned(QWEN3_8B, processes=8)
    asked: list[dict[str, Any]] = [{}, {"has_reference": True}, {"critic": plan.shape}]
    held, with_reference, with_critic = (plan_memory(replace(plan, **others))[0] for others in asked)
    assert held.other_models == 0
    assert with_reference.other_models == held.parameters
    assert with_critic.other_models == plan_memory(with_score_head(plan))[0].states
    assert with_critic.activations == held.activations, "they work in turn"


def test_a_reference_of_megatron_is_its_parameters_and_masters() -> None:
    plan = planned(QWEN3_8B, "megatron", processes=8, tensor=2)
    (held,) = plan_memory(replace(plan, has_reference=True))[:1]
    moments = 2 * (held.optimizer // 3)
    assert held.other_models == held.parameters + held.optimizer - moments


@pytest.mark.parametrize(
    ("backend", "processes", "layout", "words"),
    [
        ("megatron", 2, {"tensor": 4}, "learner.processes = 2 .* cannot be divided"),
        ("mine:Backend", 1, {}, "nothing is known of what `mine:Backend` holds"),
    ],
)
def test_what_cannot_be_is_refused(backend: str, processes: int, layout: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_memory(planned(TINY_MOE, backend, processes, **layout))
