"""Nothing is trained before the first fresh tokens have shown that engine and learner compute the same model."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from headway.learner.algorithm_config import AlgorithmConfig
from headway.learner.backends import open_backend
from headway.learner.backends.base import Backend
from headway.learner.batching.packing import PackableSequence, concatenate, pack
from headway.learner.models.pretrained import load_model
from headway.learner.objective.logprob_agreement import EXACT, DisagreementError
from headway.learner.objective.update import Updater
from headway.learner.stages.loop import replay
from tests.learner.tiny import OPTIMIZER, model_config, sequences
from tests.learner.updaters import open_updater

MODEL = model_config("qwen3", initializer_range=0.3)
LENGTHS = [12, 20, 9, 16, 14, 11]
Logits = Callable[[torch.Tensor], torch.Tensor]
"""[1, T] tokens to their [1, T, V] logits, as an engine computes them."""


def engine_of(**changes: Any) -> Logits:
    model = load_model(MODEL, seed=1).eval()
    config = model_config("qwen3", initializer_range=0.3, **changes)
    other = load_model(config, seed=1).eval()
    other.load_state_dict(model.state_dict())
    return lambda ids: other(input_ids=ids).logits


def capped(logits: Logits) -> Logits:
    return lambda ids: 5 * torch.tanh(logits(ids) / 5)


@torch.no_grad()
def sampled_by(engine: Logits, lags: Sequence[int] = (0,), *, leaks: bool = False) -> list[PackableSequence]:
    """Return sequences with the logprobs that the engine gives their tokens; with `leaks` each sees those before it."""
    found, before = [], torch.zeros(0, dtype=torch.int64)
    for number, one in enumerate(sequences(LENGTHS)):
        ids = torch.from_numpy(one.token_ids.astype(np.int64))
        seen = torch.cat([before, ids]) if leaks else ids
        logprobs = engine(seen[None])[0].log_softmax(-1)[-len(ids) - 1 : -1] if leaks and len(before) else None
        if logprobs is None:
            logprobs = torch.cat([torch.zeros(1, 19), engine(ids[None])[0].log_softmax(-1)[:-1]])
        own = logprobs.gather(1, ids[:, None])[one.prompt_length :, 0]
        of_lag = np.full(len(own), lags[number % len(lags)], np.int64)
        mask = np.ones(len(own), np.uint8)
        found.append(replace(one, behavior_logprobs=own.numpy().astype(np.float32), lags=of_lag, loss_mask=mask))
        before = seen
    return found


def updater_of(backend: Backend, bound: float, *, is_cut: bool = False) -> Updater:
    return open_updater(AlgorithmConfig(), backend, max_lag=4, agreement_bound=bound, is_cut=is_cut)


def weights(backend: Backend) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.named_tensors()}


def test_a_healthy_engine_passes_once_and_its_figures_are_told() -> None:
    backend = open_backend("fsdp", MODEL, OPTIMIZER, seed=1)
    updater, given = updater_of(backend, EXACT), sampled_by(engine_of())
    first = updater.update([pack(given, 0, 1, 40)], 0).algorithm
    assert first["agreement_tokens"] == sum(int(one.loss_mask.sum()) for one in given)
    assert 0 < first["agreement_mean"] <= first["agreement_worst"] < 1e-4
    assert not [name for name in updater.update([pack(given, 0, 1, 40)], 1).algorithm if name.startswith("agreement")]


@pytest.mark.parametrize(
    ("engine", "leaks"),
    [
        (engine_of(), True),
        (engine_of(rope_parameters={"rope_type": "default", "rope_theta": 100.0}), False),
        (engine_of(rms_norm_eps=0.01), False),
        (capped(engine_of()), False),
        (lambda ids: engine_of()(ids) / 2, False),
        (lambda ids: engine_of()(ids) * torch.nan, False),
    ],
    ids=["leaks", "rope", "epsilon", "soft cap", "scale", "not a number"],
)
def test_another_model_than_the_learners_trains_nothing(engine: Logits, leaks: bool) -> None:
    backend = open_backend("fsdp", MODEL, OPTIMIZER, seed=1)
    before, given = weights(backend), sampled_by(engine, leaks=leaks)
    with pytest.raises(DisagreementError):
        updater_of(backend, EXACT).update([pack(given, 0, 1, 40)], 0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in backend.named_tensors())
    assert "agreement_mean" not in updater_of(backend, 0.0).update([pack(given, 0, 1, 40)], 0).algorithm


def test_tokens_of_older_weights_are_not_compared() -> None:
    backend = open_backend("fsdp", MODEL, OPTIMIZER, seed=1)
    updater, other = updater_of(backend, EXACT), capped(engine_of())
    assert "agreement_mean" not in updater.update([pack(sampled_by(other, [2, 1]), 0, 1, 40)], 2).algorithm
    with pytest.raises(DisagreementError):  # a resumed learner meets its first fresh ones later
        updater.update([[concatenate(sampled_by(other, [3, 0]))]], 3)


def test_tokens_of_the_learner_before_a_resume_are_not_compared() -> None:
    backend = open_backend("fsdp", MODEL, OPTIMIZER, seed=1)
    updater, batch = updater_of(backend, EXACT), pack(sampled_by(capped(engine_of())), 0, 1, 40)
    assert "agreement_mean" not in updater.update([batch], 0, is_of_this_learner=False).algorithm
    with pytest.raises(DisagreementError):
        updater.update([batch], 0)


def test_a_replay_with_other_weights_than_the_runs_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    updater = updater_of(open_backend("fsdp", MODEL, OPTIMIZER, seed=1), EXACT)
    scored = SimpleNamespace(sequences=sampled_by(capped(engine_of())))
    monkeypatch.setattr(updater, "compute_advantages", lambda *_: scored)
    log: Any = SimpleNamespace(read=lambda step: ())
    (trained,) = replay(updater, log, range(1))
    assert "agreement_mean" not in trained.update.algorithm


@pytest.mark.parametrize("leaks", [False, True])
def test_tokens_of_a_cut_vocabulary_may_be_likelier_to_the_engine_alone(leaks: bool) -> None:
    backend = open_backend("fsdp", MODEL, OPTIMIZER, seed=1)
    share = np.float32(np.log(0.8))  # of the tokens that top_k leaves
    given = [
        replace(one, behavior_logprobs=one.behavior_logprobs - share) for one in sampled_by(engine_of(), leaks=leaks)
    ]
    packed = [pack(given, 0, 1, 40)]
    with pytest.raises(DisagreementError):
        updater_of(backend, EXACT).update(packed, 0)
    if leaks:
        with pytest.raises(DisagreementError):
            updater_of(backend, EXACT, is_cut=True).update(packed, 0)
    else:
        assert updater_of(backend, EXACT, is_cut=True).update(packed, 0).algorithm["agreement_mean"] == 0.0
