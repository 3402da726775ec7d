"""Logprobs of candidates and the likeliest tokens, against log softmax over the whole vocabulary."""

import pytest
import torch

from headway.learner.backends.token_logprobs import candidate_logprobs, likeliest

from .test_token_logprobs import TOKENS, VOCABULARY, given

CANDIDATES = 4


def chosen() -> tuple[torch.Tensor, torch.Tensor]:
    """Return candidates [T, K], the last twice in its row, and the gradient that flows back through [T, 1 + K]."""
    generator = torch.Generator().manual_seed(1)
    candidates_TK = torch.randint(0, VOCABULARY, (TOKENS, CANDIDATES), generator=generator)
    candidates_TK[:, -1] = candidates_TK[:, 0]
    return candidates_TK, torch.randn(TOKENS, 1 + CANDIDATES, generator=generator, dtype=torch.float64)


def oracle(temperature: float, padded: int) -> dict[str, torch.Tensor]:
    hidden, weight, _, _ = given(padded)
    candidates_TK, pull = chosen()
    whole_TV = ((hidden @ weight[:VOCABULARY].T) / temperature).log_softmax(-1)
    logprobs = whole_TV.gather(1, candidates_TK)
    hidden_grad, weight_grad = torch.autograd.grad(logprobs, (hidden, weight), pull[:, 1:])
    largest = whole_TV.detach().amax(1, keepdim=True)
    best = whole_TV.detach().topk(CANDIDATES)
    return {
        "logprobs": torch.cat([largest, logprobs.detach()], 1),
        "hidden": hidden_grad,
        "weight": weight_grad,
        "likeliest": torch.stack([best.indices.float(), best.values.float()], -1),
    }


def assert_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=1e-12 if tensor.dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("rows", [1, 5, 1000])
@pytest.mark.parametrize("padded", [VOCABULARY, 26])
def test_any_chunk_equals_log_softmax_and_its_gradients(temperature: float, rows: int, padded: int) -> None:
    hidden, weight, _, _ = given(padded)
    candidates_TK, pull = chosen()
    options = {"vocabulary": VOCABULARY, "logits_per_chunk": rows * padded + padded // 2}
    logprobs = candidate_logprobs(hidden, weight, candidates_TK, temperature, **options)
    hidden_grad, weight_grad = torch.autograd.grad(logprobs, (hidden, weight), pull)
    found = likeliest(hidden, weight, CANDIDATES, temperature, **options)
    got = {"logprobs": logprobs.detach(), "hidden": hidden_grad, "weight": weight_grad, "likeliest": found}
    assert_equal(got, oracle(temperature, padded))


def test_more_than_the_vocabulary_is_the_vocabulary() -> None:
    hidden, weight, _, _ = given(26)
    found = likeliest(hidden, weight, 1000, 1.0, vocabulary=VOCABULARY)
    assert found.shape == (TOKENS, VOCABULARY, 2)
    assert found[..., 0].sort().values.eq(torch.arange(VOCABULARY)).all()
    torch.testing.assert_close(found[..., 1].exp().sum(1), torch.ones(TOKENS))
