"""With several updates a step, each has the published loss of the weights with which it begins, for every preset."""

import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

from headway.algorithms.presets import PRESETS
from headway.learner.algorithm_config import AlgorithmConfig
from headway.learner.backends import open_backend
from headway.learner.backends.base import Backend, TokenLoss
from headway.learner.backends.fsdp.backend import FsdpBackend
from headway.learner.batching.batch import PackedBatch
from headway.learner.objective.composition import needs_reference
from headway.learner.objective.loss import Objective
from headway.learner.objective.update import Update, Updater
from tests.learner.preset_oracles import LOSSES, MAX_NEW_TOKENS, OF_PAIRS, Response, Token, loss_of
from tests.learner.test_presets import CANDIDATES, sampled
from tests.learner.tiny import OPTIMIZER, model_config
from tests.learner.updaters import open_critic, open_updater

ALGORITHMS: dict[str, dict[str, Any]] = {
    **{name: preset.algorithm for name, preset in PRESETS.items()},
    "self_normalized": {"objective": {"kind": "policy_gradient"}, "corrections": [{"kind": "self_normalized_is"}]},
    "clipped_self_normalized": {**PRESETS["tis"].algorithm, "corrections": [{"kind": "self_normalized_is"}]},
    "decoupled_m2po": {**PRESETS["decoupled_ppo"].algorithm, "corrections": [{"kind": "decoupled"}, {"kind": "m2po"}]},
    "clipped_m2po": {"corrections": [{"kind": "m2po"}]},
    "stale_distillation": {"distillation": {"coefficient": 0.5, "place": "advantage"}},
    "distillation_advantage": {
        **PRESETS["tis"].algorithm,
        "distillation": {"coefficient": 1.0, "place": "advantage"},
    },
    "candidates": {
        **PRESETS["tis"].algorithm,
        "distillation": {"coefficient": 0.5, "place": "loss", "top_k": CANDIDATES},
    },
    **{
        name: {**algorithm, "distillation": {"coefficient": 0.5, "place": "loss"}}
        for name, algorithm in {
            "distillation_loss": PRESETS["tis"].algorithm,
            "stale_distillation_loss": PRESETS["grpo"].algorithm,
            "plain_distillation_loss": PRESETS["rloo"].algorithm,
        }.items()
    },
    "entropy": {**PRESETS["tis"].algorithm, "entropy_coefficient": 0.5, "aggregation": {"kind": "sequence_mean"}},
    "weighed_online_dpo": {**PRESETS["online_dpo"].algorithm, "corrections": [{"kind": "pair_truncated_is"}]},
}
MODEL = model_config("qwen3")
FAST = msgspec.structs.replace(OPTIMIZER, learning_rate=0.02, max_grad_norm=10.0)
"""A rate so high that the first update takes many tokens out of every trust region."""


@functools.cache
def reference() -> Backend:
    """Return the model with which losses of pairs compare; it is never trained."""
    return open_backend("fsdp", MODEL, FAST, seed=4)


class Seen(NamedTuple):
    """One micro-batch as an update trained it."""

    batch: PackedBatch
    current_T: torch.Tensor
    share: float
    gradient_T: torch.Tensor


def watch(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> list[list[Seen]]:
    """Return a list that collects the micro-batches of each of the backend's updates."""
    updates: list[list[Seen]] = []
    step = backend.step

    def watched(
        batches: Sequence[PackedBatch], loss: TokenLoss, temperature: float, learning_rate: float
    ) -> tuple[float, float, list[dict[str, float]]]:
        seen: list[Seen] = []
        updates.append(seen)

        def watched_loss(index: int, current_T: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
            alone_T = current_T.detach().clone().requires_grad_()
            share, _ = loss(index, alone_T)
            (gradient_T,) = torch.autograd.grad(share, alone_T)
            seen.append(Seen(batches[index], alone_T.detach(), float(share.detach()), gradient_T))
            return loss(index, current_T)

        return step(batches, watched_loss, temperature, learning_rate)

    monkeypatch.setattr(backend, "step", watched)
    return updates


def responses_of(seen: Sequence[Seen], proximal: Backend) -> tuple[list[Response], list[torch.Tensor]]:
    """Return the trained tokens of each sequence, and the place of their gradient: [T] of each micro-batch."""
    responses, places = [], []
    batches = [one.batch for one in seen]
    plain = [batch.plain for batch in batches]
    logprobs, of_reference = proximal.logprobs(plain, 1.0), reference().logprobs(plain, 1.0)
    for one, proximal_T, reference_T in zip(seen, logprobs, of_reference, strict=True):
        batch, current_T = one.batch, one.current_T.double().requires_grad_()
        places.append(current_T)
        bounds = batch.cu_seqlens.tolist()
        for start, end in pairwise(bounds):
            responses.append(
                [
                    Token(
                        current_T[t] if current_T.dim() == 1 else current_T[t, 0],
                        float(proximal_T[t]),
                        float(batch.behavior_logprobs_T[t]),
                        float(batch.advantages_T[t]),
                        int(batch.lags_T[t]),
                        float(reference_T[t]),
                        float(batch.teacher_logprobs_T[t]) if batch.teacher_logprobs_T is not None else 0.0,
                        candidates_at(batch, current_T, t),
                        current_T[t, 2] if batch.wants_confidence else None,
                    )
                    for t in range(start, end)
                    if batch.loss_mask_T[t] > 0
                ]
            )
    return [*responses], places


def candidates_at(batch: PackedBatch, current_T: torch.Tensor, t: int) -> list[tuple[torch.Tensor, float]]:
    if batch.teacher_logprobs_TC is None:
        return []
    return list(zip(current_T[t, 2:], batch.teacher_logprobs_TC[t].tolist(), strict=True))


def train(name: str, updates_per_step: int, monkeypatch: pytest.MonkeyPatch) -> list[list[Seen]]:
    """Return the micro-batches of each update of one step; half of the tokens were sampled two versions ago."""
    config = msgspec.convert(ALGORITHMS[name], AlgorithmConfig)
    backend = open_backend("fsdp", MODEL, FAST, seed=3)
    updater = open_updater(
        config,
        backend,
        reference() if needs_reference(config) else None,
        open_critic(MODEL, optimizer=FAST) if config.advantage.kind == "gae" else None,
        objective=Objective(config, max_new_tokens=MAX_NEW_TOKENS),
        learner={"updates_per_step": updates_per_step},
        optimizer=FAST,
        max_new_tokens=MAX_NEW_TOKENS,
        max_lag=4,
    )
    judged = updater.compute_advantages(sampled(backend, range(4), noise=0.3), 2)
    updates = watch(backend, monkeypatch)
    updater.update(updater.pack(judged.sequences), 2)
    return updates


def test_there_is_an_oracle_for_each() -> None:
    assert LOSSES.keys() | OF_PAIRS.keys() == ALGORITHMS.keys()


@pytest.mark.parametrize("updates_per_step", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_update_of_a_step_is_the_published_loss(
    name: str, updates_per_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    before = open_backend("fsdp", MODEL, FAST, seed=3)
    updates = train(name, updates_per_step, monkeypatch)
    assert len(updates) == updates_per_step
    for number, seen in enumerate(updates):
        assert all(one.batch.wants_confidence is (name == "entropy") for one in seen), "it costs a pass over all logits"
        responses, places = responses_of(seen, before)
        expected = loss_of(name, responses)
        assert sum(one.share for one in seen) == pytest.approx(float(expected.detach()), abs=2e-5)
        gradients = torch.autograd.grad(expected, places, allow_unused=True)
        for one, gradient_T in zip(seen, gradients, strict=True):
            wanted_T = torch.zeros_like(one.gradient_T) if gradient_T is None else gradient_T.float()
            torch.testing.assert_close(one.gradient_T, wanted_T, rtol=1e-4, atol=2e-6)
        if number:
            moved = [abs(float(t.current.detach()) - t.proximal) for response in responses for t in response]
            assert max(moved) > 0.3


def test_the_first_update_of_a_step_takes_no_forward_pass_beside_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = list[int]()
    logprobs, update = FsdpBackend.logprobs, Updater.update

    def counted(backend: FsdpBackend, batches: Sequence[PackedBatch], temperature: float) -> list[torch.Tensor]:
        passes.append(len(batches))
        return logprobs(backend, batches, temperature)

    def updated(updater: Updater, *arguments: Any) -> Update:
        passes.clear()  # those of the samples
        return update(updater, *arguments)

    monkeypatch.setattr(FsdpBackend, "logprobs", counted)
    monkeypatch.setattr(Updater, "update", updated)
    updates = train("decoupled_ppo", 3, monkeypatch)
    assert passes == [len(seen) for seen in updates[1:]]
