# mypy: disable-error-code="call-arg"
"""The figures of a whole batch that corrections need add up over its parts, and are those of the equations."""

import pytest
import torch

from headway.algorithms.correction_masks import BATCH_STATISTICS, m2po, m2po_threshold
from headway.algorithms.corrections import CORRECTIONS
from headway.algorithms.ratios import token_log_ratio
from headway.algorithms.tokens import Tokens
from tests.algorithms.ragged import Ragged, every_case, make


def settled(kind: str, batches: list[Ragged], **options: float) -> dict[str, float]:
    statistic = BATCH_STATISTICS[kind]
    sums = torch.stack([statistic.sums(batch.current_T, batch.tokens, **options) for batch in batches]).sum(0)
    return statistic.settle(sums, **options)


def joined(batches: list[Ragged]) -> tuple[torch.Tensor, Tokens]:
    columns = [torch.cat(column) for column in zip(*(batch.tokens[:4] for batch in batches), strict=True)]
    bounds = torch.cat([torch.zeros(1, dtype=torch.int32), *(batch.cu_seqlens.diff() for batch in batches)]).cumsum(0)
    return torch.cat([batch.current_T for batch in batches]), Tokens(*columns, bounds)


def test_they_are_corrections() -> None:
    assert BATCH_STATISTICS.keys() <= CORRECTIONS.keys()


@every_case
def test_self_normalized_weights_have_mean_one(case: str) -> None:
    batches = [make(case), make("ragged", seed=1)]
    options = settled("self_normalized_is", batches, cap=1.5)
    policy_T, tokens = joined(batches)
    weights_T, _ = CORRECTIONS["self_normalized_is"](policy_T, tokens, cap=1.5, **options)
    trained_T = weights_T[tokens.loss_mask_T > 0]
    assert float(trained_T.double().mean()) == pytest.approx(1, rel=1e-5)


def test_a_batch_without_trained_tokens_is_left_alone() -> None:
    assert settled("self_normalized_is", [make("all_masked")]) == {"mean_weight": 1.0}
    assert settled("m2po", [make("empty")])["limit"] >= 0


@every_case
@pytest.mark.parametrize("budget", [0.04, 0.01])
def test_the_limit_of_m2po_keeps_the_second_moment_of_the_batch_within_its_budget(case: str, budget: float) -> None:
    batches = [make(case), *(make("ragged", seed=seed) for seed in range(1, 9))]
    limit = settled("m2po", batches, budget=budget)["limit"]
    policy_T, tokens = joined(batches)
    log_ratio_T = token_log_ratio(policy_T, tokens.behavior_logprobs_T, tokens.loss_mask_T)
    exact = m2po_threshold(log_ratio_T, tokens.loss_mask_T, tokens.advantages_T, budget=budget)
    weights_T, _ = m2po(policy_T, tokens, budget=budget, limit=limit)
    outward_T = (log_ratio_T * tokens.advantages_T > 0) & (tokens.loss_mask_T > 0)
    kept_T = log_ratio_T[outward_T & (weights_T > 0)].double()
    assert not kept_T.numel() or float((kept_T**2).mean()) <= budget
    exact_kept = int((outward_T & (log_ratio_T.abs() <= exact)).sum())
    assert exact_kept - 2 <= kept_T.numel() <= exact_kept
