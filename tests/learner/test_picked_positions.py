"""The output head computes logprobs of trained tokens alone where no others are read, to the same update."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

import headway.learner.models.attention
from headway.learner.algorithm_config import AlgorithmConfig, ObjectiveConfig
from headway.learner.backends import open_backend
from headway.learner.backends.fsdp import backend as fsdp_backend
from headway.learner.backends.fsdp.backend import FsdpBackend
from headway.learner.batching.batch import PackedBatch
from headway.learner.batching.packing import concatenate
from headway.learner.batching.padding import PaddedShape
from headway.learner.config import ComputeConfig
from headway.learner.objective.loss import Objective
from tests.learner.recording import Repeated, kernel
from tests.learner.test_prefix_trees import sharing
from tests.learner.test_token_logprobs import Products
from tests.learner.tiny import OPTIMIZER, VOCABULARY, model_config, ratio_loss, sequences


def rows(*, only_trained: bool, seed: int = 0) -> list[PackedBatch]:
    """Return a row that shares its prompts, one that does not, and one of which nothing is trained. Most tokens are
    prompts."""
    tree = concatenate(sharing(3, prompt=30, agreed=2, seed=seed), is_tree=True)
    plain = concatenate(sequences([40, 9, 50], seed=seed))
    few_T = plain.loss_mask_T * (torch.arange(plain.num_tokens) % 5 == 0)
    masked = [dataclasses.replace(plain, loss_mask_T=mask_T) for mask_T in (few_T, torch.zeros_like(few_T))]
    return [dataclasses.replace(batch, only_trained=only_trained) for batch in (tree, *masked)]


def opened(compute: ComputeConfig) -> FsdpBackend:
    backend = open_backend("fsdp", model_config("qwen3"), OPTIMIZER, seed=1, compute=compute)
    assert isinstance(backend, FsdpBackend)
    return backend


def trained(backend: FsdpBackend, *, only_trained: bool) -> list[torch.Tensor]:
    """Return logprobs of trained tokens, losses and norms of a few updates, and the weights after them."""
    found: list[torch.Tensor] = []
    for seed in range(4):
        batches = rows(only_trained=only_trained, seed=seed)
        for batch, logprobs_T in zip(batches, backend.logprobs(batches, 0.8), strict=True):
            found.append(logprobs_T * batch.loss_mask_T)
        loss, norm, _ = backend.step(batches, ratio_loss(batches, 30.0), 0.8, 1e-3)
        found += [torch.tensor(loss), torch.tensor(norm)]
    return found + [tensor for _, tensor in backend.named_tensors()]


@pytest.mark.parametrize("is_replayed", [False, True])
def test_an_update_is_the_same(is_replayed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_replayed:
        monkeypatch.setattr(headway.learner.models.attention, "varlen_attn", kernel)
        monkeypatch.setattr(fsdp_backend, "open_recorder", lambda _: Repeated())
        monkeypatch.setattr(fsdp_backend, "why_launched", lambda *_, **__: "")
    whole, picked = opened(ComputeConfig()), opened(ComputeConfig(cuda_graphs="always"))
    expected, found = trained(whole, only_trained=False), trained(picked, only_trained=True)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)
    if is_replayed:
        assert picked._replayed is not None
        assert {kind.shape.picked > 0 for kind in picked._replayed._recorded} == {False, True}


def test_the_head_computes_no_more_than_is_trained() -> None:
    backend = opened(ComputeConfig())
    tree, plain, none = rows(only_trained=True)
    assert tree.tree is not None
    predicting = {int(tree.tree.predictor_T[token]) for token in tree.loss_mask_T.nonzero()}
    for batch, count in ((tree, len(predicting)), (plain, int(plain.loss_mask_T.sum())), (none, none.num_tokens)):
        with Products() as products:
            (logprobs_T,) = backend.logprobs([batch], 1.0)
        assert sum(size[0] for size in products.sizes if size[-1] == VOCABULARY) == count
        assert batch is not plain or torch.equal(logprobs_T != 0, batch.loss_mask_T > 0)


def test_functions_of_a_recipe_read_what_they_like() -> None:
    assert Objective(AlgorithmConfig()).ignores_context
    own = AlgorithmConfig(objective=ObjectiveConfig(kind="headway.algorithms.objectives:unclipped"))
    assert not Objective(own).ignores_context


def test_a_shape_holds_a_few_more_picked_positions() -> None:
    """Rows of one task have nearly the same share of trained tokens, and then one shape."""

    def shape(trained: int) -> PaddedShape:
        mask_T = F.pad(torch.ones(trained), (2000 - trained, 0))
        batch = concatenate(sequences([2000]))
        return PaddedShape.of(dataclasses.replace(batch, loss_mask_T=mask_T, only_trained=True))

    assert shape(600) == shape(640)
    assert shape(600).picked == 640
    assert shape(700).picked == 768
    assert shape(1900).picked == 0
