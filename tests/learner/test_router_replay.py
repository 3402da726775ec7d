# mypy: disable-error-code="arg-type, assignment, union-attr"
"""Experts that a batch prescribes: the pass is the same where the router would choose them, and forced where not."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from headway.broker.errors import ConfigError
from headway.broker.schema import Trajectory
from headway.learner.algorithm_config import AlgorithmConfig, KlConfig
from headway.learner.backends import open_backend
from headway.learner.backends.base import Backend
from headway.learner.backends.fsdp.experts import _route
from headway.learner.backends.fsdp.policy import FEW_EXPERTS, Policy, ValueModel, prepare_layers
from headway.learner.backends.moe import RecordedExperts
from headway.learner.batching.batch import PackedBatch
from headway.learner.batching.clusters import pack_units
from headway.learner.batching.packing import concatenate, from_trajectory
from headway.learner.batching.router_replay import Routing, RoutingError, routing_of
from headway.learner.config import ComputeConfig, LayoutConfig
from headway.learner.models.pretrained import load_config, load_model
from tests.learner import replay_rank
from tests.learner.batches import group
from tests.learner.replay_rank import DENOMINATOR, Case, Result, batches_of, samples
from tests.learner.replayed import CHOSEN, LAYERS, LENGTHS, TEMPERATURE, forced, model, with_experts
from tests.learner.test_fsdp import trained_tokens
from tests.learner.tiny import OPTIMIZER, model_config, ratio_loss, sequences, share
from tests.learner.torchrun import run_ranks
from tests.learner.updaters import open_updater

MODELS = {
    "few experts": model(FEW_EXPERTS),
    "many experts": model(9),
    "gates as they are": model(9, norm_topk_prob=False),
}


def own_choices(policy: Policy, batch: PackedBatch) -> torch.Tensor:
    """Return the router's own choices, int16 [T, L, K]."""
    chosen: list[torch.Tensor] = []
    hooks = [
        layer.mlp.experts.register_forward_pre_hook(lambda _, arguments: chosen.append(arguments[1]))
        for layer in policy.layers
    ]
    with torch.no_grad():
        policy(batch, TEMPERATURE)
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, 1).to(torch.int16)


def passed(policy: Policy, batch: PackedBatch, denominator: float) -> dict[str, torch.Tensor]:
    """Return the logprobs and every gradient."""
    policy.zero_grad()
    logprobs_T = policy(batch, TEMPERATURE)
    share(batch, logprobs_T, denominator).backward()
    gradients = {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}
    return gradients | {"logprobs": logprobs_T.detach()}


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", MODELS)
def test_replaying_its_own_choices_changes_no_bit(name: str, recompute: Any) -> None:
    policy = Policy(load_model(MODELS[name], 1), on_cpu=True, half_precision=False)
    prepare_layers(policy.layers, ComputeConfig(recompute=recompute))
    batch = concatenate(sequences(LENGTHS))
    expected = passed(policy, batch, 10.0)
    got = passed(policy, dataclasses.replace(batch, experts_TLK=own_choices(policy, batch)), 10.0)
    assert got.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(got[key], tensor), key
    different, replayed = policy.tally_2.tolist()
    assert (different, replayed > 0) == (0, True)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", MODELS)
def test_other_choices_are_forced_upon_a_packed_row(name: str, recompute: Any) -> None:
    config = MODELS[name]
    given = with_experts(sequences(LENGTHS), load_config(config).num_experts)
    logprobs_T, gradients = forced(config, given, trained_tokens(given))
    policy = Policy(load_model(config, 1), on_cpu=True, half_precision=False)
    prepare_layers(policy.layers, ComputeConfig(recompute=recompute))
    batch = concatenate(given)
    got = passed(policy, batch, trained_tokens(given))
    torch.testing.assert_close(got.pop("logprobs"), logprobs_T, rtol=0, atol=1e-5)
    assert got.keys() == gradients.keys()
    assert gradients["model.layers.0.mlp.gate.weight"].abs().max() > 1e-4, "gates learn"
    for key, tensor in gradients.items():
        torch.testing.assert_close(got[key].double(), tensor, rtol=0, atol=1e-5)
    unforced = passed(policy, dataclasses.replace(batch, experts_TLK=None), 1.0)
    assert (unforced["logprobs"] - logprobs_T).abs().max() > 0.01


def test_a_step_reports_how_often_its_routers_disagree() -> None:
    config = MODELS["many experts"]
    backend = open_backend("fsdp", config, OPTIMIZER, seed=1)
    batch = concatenate(sequences(LENGTHS))
    own_TLK = own_choices(Policy(load_model(config, 1), on_cpu=True, half_precision=False), batch)
    recorded_TLK = own_TLK.flip(-1)  # in another order: no other choice
    missing = next(expert for expert in range(9) if expert not in own_TLK[0, -1])
    recorded_TLK[0, -1, 0], recorded_TLK[5] = missing, -1  # the last layer's: no other choice depends on it
    replayed = dataclasses.replace(batch, experts_TLK=recorded_TLK)

    def no_loss(_: int, logprobs_T: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        return logprobs_T.sum() * 0.0, {}

    backend.logprobs([replayed], 1.0)  # without a gradient: not counted
    for _ in range(2):
        _, _, reports = backend.step([replayed, batch], no_loss, 1.0, 0.0)
        choices = float((batch.num_tokens - 1) * LAYERS * CHOSEN)
        assert reports == [{"router_disagreement_sum": 1.0, "router_disagreement_count": choices}, {}]
    assert backend.step([batch], no_loss, 1.0, 0.0)[2] == [{}]


def test_a_critic_chooses_for_itself() -> None:
    critic = ValueModel(load_model(MODELS["many experts"], 1), on_cpu=True, half_precision=False)
    nn.init.ones_(critic.head.weight)
    batch = concatenate(with_experts(sequences(LENGTHS), 9))
    assert torch.equal(critic(batch), critic(dataclasses.replace(batch, experts_TLK=None)))


@pytest.mark.parametrize("kind", [Qwen3MoeTopKRouter, Qwen2MoeTopKRouter, OlmoeTopKRouter])
@pytest.mark.parametrize("normalized", [True, False])
def test_known_routers_weigh_what_is_replayed_as_their_own(kind: type[nn.Module], normalized: bool) -> None:
    names = {Qwen3MoeTopKRouter: "qwen3_moe", Qwen2MoeTopKRouter: "qwen2_moe", OlmoeTopKRouter: "olmoe"}
    sizes = {"hidden_size": 8, "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": normalized}
    router = kind(AutoConfig.for_model(names[kind], **sizes))
    nn.init.normal_(router.weight)
    hidden = torch.randn(20, 8)
    router.recorded = None
    expected = _route(router, hidden)
    router.recorded = RecordedExperts(expected[2].to(torch.int16), torch.zeros(2, dtype=torch.int64))
    assert all(torch.equal(one, other) for one, other in zip(_route(router, hidden), expected, strict=True))
    assert torch.allclose(F.softmax(expected[0], -1).gather(1, expected[2]).sum(-1), expected[1].sum(-1)) != normalized


def with_choices(one: Trajectory) -> Trajectory:
    fed = len(one.prompt_tokens) + len(one.response_tokens) - 1
    experts = np.arange(fed * LAYERS * CHOSEN, dtype=np.uint8).reshape(fed, LAYERS, CHOSEN) % 4
    return msgspec.structs.replace(one, experts=experts)


def trajectory(**changes: object) -> Trajectory:
    return msgspec.structs.replace(with_choices(group(0).trajectories[0]), **changes)


TINY = Routing(layers=LAYERS, experts=4, per_token=CHOSEN)


def test_choices_lie_at_their_tokens_and_the_last_token_has_none() -> None:
    given = trajectory()
    packed = from_trajectory(given, advantages=0.0, step=0, max_lag=0, routing=TINY) * 2
    batch = concatenate(packed)
    assert batch.experts_TLK is not None
    assert batch.experts_TLK.dtype is torch.int16
    for rows in batch.experts_TLK.chunk(2):
        assert np.array_equal(rows[:-1].numpy(), given.experts)
        assert (rows[-1] == -1).all()
    assert concatenate([]).experts_TLK is None
    unasked = from_trajectory(given, advantages=0.0, step=0, max_lag=0)
    assert concatenate(unasked).experts_TLK is None


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"experts": None}, "does not say which experts"),
        ({"experts": np.full((3, 4, 2), 4, np.uint8)}, "up to 4"),
        ({"experts": np.zeros((3, 1, 2), np.uint8)}, "2 in each of 1 layers; the model chooses 2 of 4 in each of 4"),
        ({"experts": np.zeros((3, 4, 3), np.uint8)}, "3 in each of 4 layers"),
    ],
)
def test_a_sample_without_this_models_choices_is_refused(changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(RoutingError, match=complaint):
        from_trajectory(trajectory(**changes), advantages=0.0, step=0, max_lag=0, routing=TINY)


def test_what_a_model_chooses_is_known_from_its_configuration() -> None:
    assert routing_of(load_config(model(4))) == TINY
    mixed = model(num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert routing_of(load_config(mixed)).layers == 2
    with pytest.raises(ConfigError, match="this qwen3 has none"):
        routing_of(load_config(model_config("qwen3")))
    with pytest.raises(ConfigError, match="not mixtral's"):
        routing_of(AutoConfig.for_model("mixtral"))


def test_dense_layers_among_those_with_experts_are_not_counted() -> None:
    config = model(4, num_hidden_layers=LAYERS + 1, mlp_only_layers=[1])
    policy = Policy(load_model(config, 1), on_cpu=True, half_precision=False)
    given = with_experts(sequences(LENGTHS), 4)
    batch = concatenate(given)
    seen: list[torch.Tensor] = []
    for layer in (policy.layers[0], *policy.layers[2:]):
        layer.mlp.experts.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[1]))
    policy(batch, TEMPERATURE)
    assert batch.experts_TLK is not None
    is_recorded = batch.experts_TLK[:, 0, 0] >= 0
    for number, chosen_TK in enumerate(seen):
        assert torch.equal(chosen_TK[is_recorded], batch.experts_TLK[is_recorded, number].long())


CASES = {
    "fsdp, context 2": Case(backend="fsdp", layout=LayoutConfig(context=2)),
    "fsdp, context 2, recomputed": Case(
        backend="fsdp", layout=LayoutConfig(context=2), compute=ComputeConfig(recompute="full")
    ),
    "fsdp, two replicas": Case(backend="fsdp"),
    "megatron, two replicas": Case(backend="megatron"),
    "megatron, tensor 2": Case(backend="megatron", layout=LayoutConfig(tensor=2)),
    "megatron, pipeline 2, recomputed": Case(
        backend="megatron", layout=LayoutConfig(pipeline=2), compute=ComputeConfig(recompute="full")
    ),
    "megatron, interleaved": Case(backend="megatron", layout=LayoutConfig(pipeline=2, virtual_pipeline=2)),
    "megatron, context 2, expert 2": Case(backend="megatron", layout=LayoutConfig(context=2, expert=2)),
}


Told = dict[str, list[tuple[Result, Result]]]
"""The results of each rank in every case: those of samples by themselves, and of samples that share tokens."""


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Told:
    directory = tmp_path_factory.mktemp("ranks")
    texts = [msgspec.json.encode(case).decode() for case in CASES.values()]
    run_ranks(replay_rank.__name__, 2, directory, *texts)
    return {
        name: [
            msgspec.json.decode((directory / f"{number}_{rank}.json").read_bytes(), type=tuple[Result, Result])
            for rank in range(2)
        ]
        for number, name in enumerate(CASES)
    }


@pytest.fixture(scope="module")
def expected() -> list[tuple[list[list[float]], float]]:
    """Return the logprobs of one replica and of each of two, as packed in micro-batches, and the gradient's norm: of
    samples by themselves, and of those that share tokens."""
    return [expected_of(is_shared) for is_shared in (False, True)]


def expected_of(is_shared: bool) -> tuple[list[list[float]], float]:
    given = samples(is_shared=is_shared)
    logprobs_T, gradients = forced(model(), given, DENOMINATOR)
    by_tokens = {
        tuple(one.token_ids): part.tolist()
        for one, part in zip(given, logprobs_T.split([len(one.token_ids) for one in given]), strict=True)
    }
    shares = []
    for replica, replicas in ((0, 1), (0, 2), (1, 2)):
        batches = batches_of(replica, replicas, is_shared=is_shared)
        assert any(batch.tree is not None for batch in batches) is is_shared
        packed = [
            tuple(tokens.tolist())
            for batch in batches
            for tokens in batch.token_ids_T.split(batch.cu_seqlens.diff().tolist())
        ]
        shares.append([value for tokens in packed for value in by_tokens[tokens]])
    return shares, float(torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt())


@pytest.mark.slow
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_every_layout_takes_each_tokens_choices(
    name: str, is_shared: bool, layouts: Told, expected: list[tuple[list[list[float]], float]]
) -> None:
    (whole, *halves), norm = expected[is_shared]
    told = [results[is_shared] for results in layouts[name]]
    has_one_replica = told[0].replica == told[1].replica
    for result, logprobs in zip(told, [whole, whole] if has_one_replica else halves, strict=True):
        np.testing.assert_allclose(result.logprobs, logprobs, rtol=0, atol=2e-5)
        assert result.norm == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("is_shared", [False, True])
def test_every_layout_counts_each_choice_once(is_shared: bool, layouts: Told) -> None:
    """Recomputation passes twice and doubles both counts."""
    shares = set()
    for name, results in layouts.items():
        told = [one[is_shared] for one in results]
        replicas = len({one.replica for one in told})
        batches = [batch for replica in range(replicas) for batch in batches_of(replica, replicas, is_shared=is_shared)]
        computed = sum(batch.num_tokens - len(batch.cu_seqlens) + 1 for batch in batches)
        counted = [one.disagreement for one in told][:replicas]
        assert replicas == 2 or told[0].disagreement == told[1].disagreement
        different = sum(one["router_disagreement_sum"] for one in counted)
        count = sum(one["router_disagreement_count"] for one in counted)
        assert count in (computed * LAYERS * CHOSEN, 2 * computed * LAYERS * CHOSEN), name
        shares.add(different / count)
    assert len(shares) == 1
    assert 0.5 < shares.pop() < 1


@pytest.mark.parametrize("micro_batch_tokens", [1, 40, 1000])
@pytest.mark.parametrize("prefix_sharing", ["never", "always"])
def test_disagreement_does_not_depend_on_packing(micro_batch_tokens: int, prefix_sharing: Any) -> None:
    """A token that samples share is computed once, and counts for each of them."""
    given = samples(is_shared=True)
    backend = open_backend("fsdp", model(), OPTIMIZER, seed=1)
    told = []
    for how in ({}, {"micro_batch_tokens": micro_batch_tokens, "prefix_sharing": prefix_sharing}):
        packing = {"micro_batch_tokens": 64, "prefix_sharing": "never", **how}
        rows = pack_units([[one] for one in given], replica=0, replicas=1, **packing)
        batches = [row.batch for row in rows]
        _, _, reports = backend.step(batches, ratio_loss(batches, DENOMINATOR), TEMPERATURE, learning_rate=0.0)
        told.append({name: value for report in reports for name, value in report.items() if "disagree" in name})
    assert told[1] == pytest.approx(told[0], abs=2)  # rounding may turn a choice
    tokens = sum(len(one.token_ids) - 1 for one in given)
    assert [one["router_disagreement_count"] for one in told] == [tokens * LAYERS * CHOSEN] * 2


class Reference:
    """A backend that notes the batches of which it computes logprobs."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.batches: list[PackedBatch] = []

    def logprobs(self, batches: Sequence[PackedBatch], temperature: float) -> list[torch.Tensor]:
        self.batches += batches
        return self._backend.logprobs(batches, temperature)


def test_an_update_replays_and_its_reference_chooses_for_itself() -> None:
    algorithm = AlgorithmConfig(kl=KlConfig(coefficient=0.1), router_replay=True)
    backend, other = (open_backend("fsdp", model(4), OPTIMIZER, seed=seed) for seed in (1, 2))
    reference = Reference(other)
    updater = open_updater(algorithm, backend, reference, routing=TINY)
    plain = [group(number) for number in range(2)]
    with pytest.raises(RoutingError, match="does not say which experts"):
        updater.compute_advantages(plain, 0)
    groups = [msgspec.structs.replace(one, trajectories=tuple(map(with_choices, one.trajectories))) for one in plain]
    update = updater.update(updater.pack(updater.compute_advantages(groups, 0).sequences), 0)
    assert 0 < update.algorithm["router_disagreement"] < 1
    assert reference.batches
    assert all(batch.experts_TLK is None for batch in reference.batches)
