"""The embedded engine's sampler draws from the distributions that it should sample."""

import pytest
import torch

from headway.rollout_workers.engines.base import GenerationRequest
from headway.rollout_workers.engines.embedded.decoder import Sampler, cut

from .generation import request

PROBABILITIES = torch.tensor([0.5, 0.3, 0.15, 0.05])


def sampled(asked: GenerationRequest, count: int = 20_000) -> torch.Tensor:
    """Return [V] how often each token came."""
    sampler = Sampler(3, torch.device("cpu"))
    logits = PROBABILITIES.log().expand(count, -1)
    tokens, logprobs = sampler.sample(logits, [asked] * count, [None] * count)
    expected = torch.log_softmax(logits[0] / (asked.temperature or 1.0), -1)
    assert torch.tensor(logprobs) == pytest.approx(expected[tokens], abs=1e-5)
    return torch.bincount(torch.tensor(tokens), minlength=4) / count


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"temperature": 1.0}, [0.5, 0.3, 0.15, 0.05]),
        ({"temperature": 0.5}, [0.6849, 0.2466, 0.0616, 0.0068]),
        ({"temperature": 1.0, "top_k": 2}, [0.625, 0.375, 0, 0]),
        ({"temperature": 1.0, "top_p": 0.81}, [0.5263, 0.3158, 0.1579, 0]),
        ({"temperature": 1.0, "top_p": 0.01}, [1, 0, 0, 0]),
        ({"temperature": 0.0}, [1, 0, 0, 0]),
    ],
)
def test_tokens_come_as_often_as_they_should(changes: dict[str, float], expected: list[float]) -> None:
    assert sampled(request([2], **changes)) == pytest.approx(torch.tensor(expected), abs=0.015)


def test_a_cut_is_for_the_request_that_asked() -> None:
    logprobs = PROBABILITIES.log().expand(2, -1)
    result = cut(logprobs, [request([2], temperature=1.0), request([2], temperature=1.0, top_k=1)])
    assert torch.equal(result[0], logprobs[0])
    assert result[1].isneginf().tolist() == [False, True, True, True]


def test_a_seed_decides_whatever_runs_beside() -> None:
    asked, other = request([2], temperature=1.0, seed=5), request([2], temperature=1.0)
    logits = torch.zeros(1, 1000)
    alone = Sampler(0, torch.device("cpu"))
    beside = Sampler(1, torch.device("cpu"))
    first, _ = alone.sample(logits, [asked], [alone.own_generator(asked)])
    second, _ = beside.sample(logits.expand(2, -1), [other, asked], [None, beside.own_generator(asked)])
    assert first[0] == second[1]
