"""Tokens that sequences share are computed once, and no result differs from that of each sequence by itself."""

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

import headway.learner.models.attention
from headway.algorithms.presets import PRESETS
from headway.learner.backends import open_backend
from headway.learner.backends.fsdp.policy import Policy, prepare_layers
from headway.learner.batching.batch import PackedBatch
from headway.learner.batching.clusters import PrefixSharing, clusters_of, pack_units
from headway.learner.batching.cost import DEFAULT_COST
from headway.learner.batching.packing import Candidates, PackableSequence, concatenate
from headway.learner.batching.tree import PrefixTree, build_tree, labels_of, size_of
from headway.learner.config import ComputeConfig
from headway.learner.models.attention import (
    PackedLayout,
    UnsupportedModelError,
    bucketed_attention,
    check_alignment,
    varlen_attention,
)
from headway.learner.models.pretrained import load_model
from tests.learner import preset_sharing
from tests.learner.tiny import OPTIMIZER, VOCABULARY, alike, model_config, sequences, share
from tests.learner.torchrun import run_ranks

token_lists = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=8)


def tree_of(token_lists: Sequence[Sequence[int]]) -> PrefixTree | None:
    return build_tree([labels_of(np.array(tokens, np.int32)) for tokens in token_lists])


def sharing(size: int, *, prompt: int, agreed: int, seed: int) -> list[PackableSequence]:
    """Return a group whose responses begin alike, for `agreed` tokens."""
    extra = np.random.default_rng(seed).integers(1, 9, size)
    given = alike(sequences([prompt + agreed + int(more) for more in extra], seed), prompt + agreed)
    return [with_prompt(sequence, prompt) for sequence in given]


def with_prompt(sequence: PackableSequence, length: int) -> PackableSequence:
    """Return the same tokens with a prompt of another length."""
    response = len(sequence.token_ids) - length
    return dataclasses.replace(
        sequence,
        prompt_length=length,
        loss_mask=np.resize(sequence.loss_mask, response),
        behavior_logprobs=np.resize(sequence.behavior_logprobs, response),
        lags=np.resize(sequence.lags, response),
        advantages=np.resize(sequence.advantages, response),
        teacher_logprobs=None,
    )


GROUPS = [*sharing(4, prompt=6, agreed=3, seed=0), *sharing(3, prompt=5, agreed=0, seed=1), *sequences([1, 7])]
"""Two groups, a sequence of one token, and one that shares nothing."""


@settings(deadline=None)
@drawn(token_lists)
def test_a_tree_has_each_beginning_with_its_next_token_once(token_lists: list[list[int]]) -> None:
    prefixes = {tuple(tokens[: end + 1]) for tokens in token_lists for end in range(1, len(tokens))}
    tree = tree_of(token_lists)
    if tree is None:
        assert len(prefixes) == sum(len(tokens) - 1 for tokens in token_lists)
        return
    assert tree.num_positions == len(prefixes) == int(tree.cu_runs[-1])
    packed = torch.tensor([token for tokens in token_lists for token in tokens])
    ends, runs = tree.cu_paths.tolist(), tree.cu_runs.tolist()
    path_of: dict[int, list[int]] = {}
    for run, (start, end) in enumerate(itertools.pairwise(ends)):
        path = tree.paths_P[start:end].tolist()
        assert path[-(runs[run + 1] - runs[run]) :] == list(range(runs[run], runs[run + 1]))
        path_of |= {position: path[: place + 1] for place, position in enumerate(path)}
    first = 0
    for tokens in token_lists:
        for place in range(1, len(tokens)):
            path = path_of[int(tree.predictor_T[first + place])]
            assert packed[tree.places_N[path]].tolist() == tokens[:place]
            assert packed[tree.places_N[path] + 1].tolist() == tokens[1 : place + 1]
        first += len(tokens)


@settings(deadline=None)
@drawn(token_lists)
def test_its_size_is_known_before_it_grows(token_lists: list[list[int]]) -> None:
    size = size_of([labels_of(np.array(tokens, np.int32)) for tokens in token_lists])
    tree = tree_of(token_lists)
    if tree is None:
        assert size.positions == size.path_tokens == sum(len(tokens) - 1 for tokens in token_lists)
        assert size.pairs == sum((len(tokens) - 1) ** 2 for tokens in token_lists)
    else:
        assert (size.positions, size.path_tokens) == (tree.num_positions, len(tree.paths_P))


def one_by_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: Any, cu_keys: Any, scale: float) -> torch.Tensor:
    """Return attention written out: the queries of a run are the last tokens of its keys."""
    parts = []
    for run in range(len(cu) - 1):
        keys = slice(int(cu_keys[run]), int(cu_keys[run + 1]))
        queries = q[cu[run] : cu[run + 1]]
        k_run, v_run = (rows[keys].repeat_interleave(q.shape[1] // k.shape[1], 1) for rows in (k, v))
        scores = torch.einsum("qhd,khd->hqk", queries, k_run) * scale
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(len(k_run) - len(queries) + 1)
        attended = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v_run)
        parts.append(attended)
    return torch.cat(parts)


@pytest.mark.parametrize("varlen", [False, True])
def test_attention_along_paths_is_that_of_whole_sequences(varlen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written-out attention stands in for the kernel, which no CPU has."""
    if varlen:
        kernel = lambda q, k, v, cu, cu_keys, *_, scale, **__: one_by_one(q, k, v, cu, cu_keys, scale)  # noqa: E731
        monkeypatch.setattr(headway.learner.models.attention, "varlen_attn", kernel)
    tree = tree_of([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7, 8], [2, 2], [1, 2, 3, 9, 6], [1, 2, 3, 4, 5, 6, 1, 1]])
    assert tree is not None
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(tree.num_positions, heads, 8, dtype=torch.float64, generator=generator).requires_grad_()
        for heads in (4, 2, 2)
    )
    layout = PackedLayout.of_paths(tree.cu_runs, tree.cu_paths, tree.paths_P, varlen=varlen)
    attended = along_paths((q, k, v), layout, 0.3)
    expected = one_by_one(q, k[tree.paths_P], v[tree.paths_P], tree.cu_runs, tree.cu_paths, 0.3)
    torch.testing.assert_close(attended, expected, rtol=0, atol=1e-12)
    pull = torch.randn(attended.shape, dtype=torch.float64, generator=generator)
    for got, wanted in zip(
        *(torch.autograd.grad(found, (q, k, v), pull) for found in (attended, expected)), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-11)


@pytest.mark.parametrize("is_from_the_end", [True, False])
def test_a_kernel_that_counts_causality_from_the_beginning_is_refused(
    is_from_the_end: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel(q: Any, k: Any, v: Any, cu: Any, cu_keys: Any, *_: Any, scale: float, **__: Any) -> torch.Tensor:
        return one_by_one(q, k, v, cu, cu_keys, scale) if is_from_the_end else v[:1]

    monkeypatch.setattr(headway.learner.models.attention, "varlen_attn", kernel)
    check_alignment.cache_clear()
    expected = (
        contextlib.nullcontext() if is_from_the_end else pytest.raises(UnsupportedModelError, match="sharing=never")
    )
    with expected:
        check_alignment(torch.device("cpu"))
    check_alignment.cache_clear()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Argument aux_data")  # of the compiler of flash-attn-4
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_attends_along_paths(dtype: torch.dtype) -> None:
    """The gradients agree too. bfloat16 rounds to 2^-8, and up to 6 copies of a key are added."""
    check_alignment(torch.device("cuda", 0))
    lengths, rng = [700, 80, 300], np.random.default_rng(0)
    lists = [[*range(500), *rng.integers(0, 9, length)] for length in (*lengths, 2, 1200, 64)]
    tree = tree_of(lists)
    assert tree is not None
    q, k, v, pull = (torch.randn(tree.num_positions, heads, 64, device="cuda", dtype=dtype) for heads in (6, 2, 2, 6))
    found = []
    for varlen, to in ((True, dtype), (False, torch.float64)):
        inputs = [rows.to(to).requires_grad_() for rows in (q, k, v)]
        layout = PackedLayout.of_paths(tree.cu_runs, tree.cu_paths, tree.paths_P, varlen=varlen)
        attended = along_paths(inputs, layout.moved(lambda tensor: tensor.cuda()), 0.125)
        found.append([attended, *torch.autograd.grad(attended, inputs, pull.to(to))])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=2e-2, atol=5e-2)


def along_paths(inputs: Sequence[torch.Tensor], layout: PackedLayout, scale: float) -> torch.Tensor:
    q, k, v = inputs
    if layout.buckets is None:
        return varlen_attention(q, k, v, layout, scale)
    return bucketed_attention(q, k, v, layout.buckets, scale)


def results(policy: Policy, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    policy.zero_grad()
    found_T = policy(batch, 0.8)
    trained_T = found_T if found_T.dim() == 1 else found_T[:, 0] + 0.1 * found_T[:, 2:].mean(1)
    share(batch, trained_T, 10.0).backward()
    return found_T.detach(), {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


def with_candidates(given: Sequence[PackableSequence]) -> list[PackableSequence]:
    """Add a teacher's candidates, which the tokens before them determine."""
    found = []
    for one in given:
        response = one.token_ids[one.prompt_length :, None]
        names = (response + np.arange(1, 4, dtype=np.int32)) % VOCABULARY
        found.append(dataclasses.replace(one, candidates=Candidates(names, np.zeros(names.shape, np.float32))))
    return found


def with_experts(given: Sequence[PackableSequence]) -> list[PackableSequence]:
    """Add experts that differ in the middle of the tokens that the first group shares."""
    found = []
    for number, one in enumerate(given):
        experts = (one.token_ids[:-1, None, None] + np.arange(2)) % 4 + np.zeros((1, 2, 1), np.int32)
        if number == 1 and len(experts) > 4:
            experts[4, 1] = (3, 0) if tuple(experts[4, 1]) != (3, 0) else (1, 2)
        found.append(dataclasses.replace(one, experts=experts.astype(np.uint8)))
    return found


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_logprobs_entropies_and_gradients_are_those_of_separate_sequences(architecture: str, recompute: Any) -> None:
    policy = Policy(load_model(model_config(architecture), 1), on_cpu=True, half_precision=False)
    prepare_layers(policy.layers, ComputeConfig(recompute=recompute))
    kinds = {"plain": GROUPS, "confident": GROUPS, "candidates": with_candidates(GROUPS)}
    if architecture == "qwen3_moe":
        kinds |= dict.fromkeys(("experts", "confident experts"), with_experts(GROUPS))
    for kind, given in kinds.items():
        separate, tree = (
            dataclasses.replace(concatenate(given, is_tree=is_tree), wants_confidence="confident" in kind)
            for is_tree in (False, True)
        )
        assert tree.num_positions < 0.7 * separate.num_positions == 0.7 * tree.num_tokens
        (expected_T, expected), (found_T, found) = results(policy, separate), results(policy, tree)
        torch.testing.assert_close(found_T, expected_T, rtol=1e-6, atol=1e-6, msg=kind)
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=0, atol=2e-6, msg=f"{kind} {name}")


def test_experts_that_differ_part_sequences() -> None:
    plain, routed = (concatenate(given, is_tree=True) for given in (GROUPS, with_experts(GROUPS)))
    assert plain.tree is not None
    assert routed.tree is not None
    assert plain.tree.num_positions + 4 == routed.tree.num_positions  # among the 8 that the first group shares


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_no_preset_trains_otherwise(preset: str) -> None:
    preset_sharing.compare(preset, "fsdp")


def test_a_bonus_for_entropy_counts_shared_tokens_once_a_sample() -> None:
    preset_sharing.compare("grpo", "fsdp", entropy_coefficient=0.5)


@pytest.mark.slow
def test_no_preset_trains_otherwise_on_megatron() -> None:
    run_ranks(preset_sharing.__name__, 1, "megatron")


def test_values_and_scores_are_those_of_separate_sequences() -> None:
    backend = open_backend("fsdp", model_config("qwen3"), OPTIMIZER, head="score")
    batches = [concatenate(GROUPS, is_tree=is_tree) for is_tree in (False, True)]
    expected_T, found_T = backend.values(batches)
    assert expected_T.any()
    torch.testing.assert_close(found_T, expected_T, rtol=0, atol=1e-6)


@settings(deadline=None, max_examples=50)
@drawn(st.integers(1, 4), st.integers(20, 300), st.sampled_from(["auto", "always", "never"]), st.integers(0, 5))
def test_every_unit_is_packed_once_within_the_budget(
    replicas: int, budget: int, prefix_sharing: PrefixSharing, groups: int
) -> None:
    given = [one for number in range(groups) for one in sharing(5, prompt=9, agreed=number, seed=number)]
    units = [[sequence] for sequence in (*given, *sequences([4, 30, 2]))]
    rows = [
        pack_units(units, replica=replica, replicas=replicas, micro_batch_tokens=budget, prefix_sharing=prefix_sharing)
        for replica in range(replicas)
    ]
    assert len({len(share) for share in rows}) == 1
    packed = [row for share in rows for row in share]
    assert sorted(unit for row in packed for unit in row.units) == list(range(len(units)))
    for row in packed:
        assert row.batch.num_positions <= budget or len(row.units) == 1
        assert row.batch.token_ids_T.tolist() == [token for unit in row.units for token in units[unit][0].token_ids]
    if prefix_sharing == "always" and groups and budget > 100:
        assert sum(row.batch.num_positions for row in packed) < sum(row.batch.num_tokens for row in packed)


def test_rows_without_shared_tokens_are_what_they_were() -> None:
    units = [[sequence] for sequence in sequences([9, 30, 4, 12, 7])]
    for prefix_sharing in ("auto", "always"):
        rows, expected = (
            pack_units(units, replica=0, replicas=2, micro_batch_tokens=30, prefix_sharing=sharing_)
            for sharing_ in (prefix_sharing, "never")
        )
        assert [row.units for row in rows] == [row.units for row in expected]
        assert all(row.batch.tree is None for row in rows)


def test_a_group_is_divided_where_replicas_would_wait_for_it() -> None:
    groups = [sharing(8, prompt=200, agreed=0, seed=seed) for seed in (0, 1)]
    for count, replicas, sizes in ((2, 1, [8, 8]), (2, 2, [8, 8]), (1, 2, [4, 4]), (2, 4, [4, 4, 4, 4])):
        units = [[sequence] for group in groups[:count] for sequence in group]
        clusters, planned = clusters_of(units, replicas, 4096, DEFAULT_COST, "auto")
        assert [len(cluster.units) for cluster in clusters] == sizes
        assert all(cluster.is_shared for cluster in clusters)
        assert sorted(index for share in planned for chosen in share for index in chosen) == list(range(len(clusters)))
    clusters, _ = clusters_of([[sequence] for sequence in groups[0]], 8, 4096, DEFAULT_COST, "auto")
    assert [cluster.is_shared for cluster in clusters] == [False] * 8
