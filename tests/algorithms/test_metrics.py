import pytest
import torch

from algorithms.metrics import effective_sample_size, merge, policy_gap, summarize
from tests.algorithms import oracles
from tests.algorithms.ragged import every_case, make


@every_case
def test_policy_gap_is_the_equation(case: str) -> None:
    batch = make(case)
    numbers = summarize(_floats(policy_gap(batch.current_T, batch.anchor_T, batch.mask_T)))
    ratios = oracles.token_ratios(batch.double())
    trained = [ratios[t] for _, row in batch.trained() for t in row]
    count = max(len(trained), 1)
    expected = {
        "ratio_mean": sum(float(r) for r in trained) / count,
        "kl_behavior": sum(float(r - 1 - torch.log(r)) for r in trained) / count,
        "ratio_max": max((float(r) for r in trained), default=0.0),
        "ratio_max_deviation": max((abs(float(r) - 1) for r in trained), default=0.0),
        "ess": sum(map(float, trained)) ** 2 / (count * sum(float(r) ** 2 for r in trained)) if trained else 0.0,
    }
    assert numbers == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_parts_merge_to_the_whole() -> None:
    batch, split = make("ragged"), 9
    whole = policy_gap(batch.current_T, batch.anchor_T, batch.mask_T)
    parts = [
        policy_gap(batch.current_T[part], batch.anchor_T[part], batch.mask_T[part])
        for part in (slice(split), slice(split, None))
    ]
    assert merge(map(_floats, parts)) == pytest.approx(_floats(whole), rel=1e-6)


def test_effective_sample_size_of_known_weights() -> None:
    assert effective_sample_size(4.0, 4.0, 4) == 1
    assert effective_sample_size(1.0, 1.0, 4) == 0.25
    assert effective_sample_size(0.0, 0.0, 0) == 0


def _floats(metrics: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}
