"""Distillation over a teacher's k likeliest tokens against float64 loops over tokens and buckets."""

import math
from typing import Any

import pytest
import torch

from headway.algorithms.distillation import top_k_distillation
from headway.algorithms.metrics import Metrics, summarize

TOKENS, VOCABULARY = 9, 7
SETTINGS: tuple[dict[str, Any], ...] = (
    {"divergence": "forward_kl"},
    {"divergence": "reverse_kl"},
    {"divergence": "jsd"},
    {"divergence": "jsd", "beta": 0.1},
)
every_setting = pytest.mark.parametrize("options", SETTINGS)


def policies(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of the student, with gradient, the teacher's logprobs, and a mask."""
    generator = torch.Generator().manual_seed(0)
    logits_TV = torch.randn(TOKENS, VOCABULARY, generator=generator, dtype=torch.float64).to(dtype)
    teacher_TV = (2 * torch.randn(TOKENS, VOCABULARY, generator=generator, dtype=torch.float64)).log_softmax(-1)
    mask_T = (torch.arange(TOKENS) % 3 != 1).to(dtype)
    return logits_TV.requires_grad_(), teacher_TV.to(dtype), mask_T


def likeliest(logits_TV: torch.Tensor, teacher_TV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, K] logprobs of the teacher's k likeliest tokens: the student's and the teacher's."""
    teacher_TK, ids_TK = teacher_TV.topk(k)
    return logits_TV.log_softmax(-1).gather(1, ids_TK), teacher_TK


def divergence(p: torch.Tensor, q: torch.Tensor, kind: str, beta: float = 0.5) -> torch.Tensor:
    """Return the divergence of a token's probabilities: p is the teacher's, q the student's."""
    if kind == "forward_kl":
        return p * torch.log(p / q)
    if kind == "reverse_kl":
        return q * torch.log(q / p)
    m = beta * p + (1 - beta) * q
    return beta * p * torch.log(p / m) + (1 - beta) * q * torch.log(q / m)


@every_setting
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_the_loss_is_the_divergence_over_k_tokens_and_the_rest(
    options: dict[str, Any], k: int, dtype: torch.dtype, tolerance: float
) -> None:
    logits_TV, teacher_TV, mask_T = policies(dtype)
    losses_T, metrics = top_k_distillation(*likeliest(logits_TV, teacher_TV, k), mask_T, **options)
    exact_TV = logits_TV.detach().double().requires_grad_()
    expected, rests = [], []
    for t in range(TOKENS):
        if mask_T[t] == 0:
            expected.append(torch.zeros((), dtype=torch.float64))
            continue
        student, teacher = exact_TV[t].softmax(0), teacher_TV[t].double().exp()
        ids = teacher.argsort(descending=True)[:k].tolist()
        buckets = [(teacher[v], student[v]) for v in ids]
        rests.append((teacher.sum() - teacher[ids].sum(), 1 - student[ids].sum()))
        kind, beta = options["divergence"], options.get("beta", 0.5)
        expected.append(torch.stack([divergence(p, q, kind, beta) for p, q in (*buckets, rests[-1])]).sum())
    expected_T = torch.stack(expected)
    torch.testing.assert_close(losses_T.double(), expected_T, rtol=tolerance, atol=tolerance)
    _same_gradients(losses_T, logits_TV, expected_T, exact_TV, tolerance)
    numbers, tokens = _numbers(metrics), len(rests)
    assert numbers[options["divergence"]] == pytest.approx(expected_T.sum().item() / tokens, rel=1e-5)
    assert numbers["teacher_rest"] == pytest.approx(sum(p.item() for p, _ in rests) / tokens, rel=1e-5)
    assert numbers["student_rest"] == pytest.approx(sum(q.item() for _, q in rests) / tokens, rel=1e-5)


@every_setting
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 2e-6)])
def test_with_the_whole_vocabulary_the_loss_is_exact(
    options: dict[str, Any], dtype: torch.dtype, tolerance: float
) -> None:
    logits_TV, teacher_TV, mask_T = policies(dtype)
    losses_T, _ = top_k_distillation(*likeliest(logits_TV, teacher_TV, VOCABULARY), mask_T, **options)
    exact_TV = logits_TV.detach().double().requires_grad_()
    kind, beta = options["divergence"], options.get("beta", 0.5)
    whole_T = divergence(teacher_TV.double().exp(), exact_TV.softmax(-1), kind, beta).sum(-1) * mask_T
    torch.testing.assert_close(losses_T.double(), whole_T, rtol=tolerance, atol=tolerance)
    _same_gradients(losses_T, logits_TV, whole_T, exact_TV, tolerance)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
@pytest.mark.parametrize("k", [1, 3, 6])
def test_what_truncation_leaves_out_is_the_divergence_within_the_rest(kind: Any, k: int) -> None:
    logits_TV, teacher_TV, _ = policies()
    teacher_TV, order_TV = teacher_TV.sort(descending=True)
    student_TV = logits_TV.detach().log_softmax(-1).gather(1, order_TV)
    losses_T, _ = top_k_distillation(student_TV[:, :k], teacher_TV[:, :k], torch.ones(TOKENS), divergence=kind)
    whole_T = divergence(teacher_TV.exp(), student_TV.exp(), kind).sum(-1)
    rest_TV = [x_TV[:, k:] - x_TV[:, k:].logsumexp(-1, keepdim=True) for x_TV in (teacher_TV, student_TV)]
    within_T = divergence(rest_TV[0].exp(), rest_TV[1].exp(), kind).sum(-1)
    share_T = (teacher_TV if kind == "forward_kl" else student_TV)[:, k:].exp().sum(-1)
    torch.testing.assert_close(whole_T - losses_T, share_T * within_T)
    assert (losses_T <= whole_T + 1e-12).all()


@every_setting
def test_gradients_are_those_of_finite_differences(options: dict[str, Any]) -> None:
    logits_TV, teacher_TV, mask_T = policies()

    def losses(logits_TV: torch.Tensor) -> torch.Tensor:
        return top_k_distillation(*likeliest(logits_TV, teacher_TV, 3), mask_T, **options)[0]

    assert torch.autograd.gradcheck(losses, logits_TV, fast_mode=True)


@every_setting
def test_a_place_without_a_token_counts_for_neither(options: dict[str, Any]) -> None:
    """A teacher may list fewer tokens at one place than at another; the student's logprob there may be any number."""
    logits_TV, teacher_TV, mask_T = policies()
    student_TK, teacher_TK = likeliest(logits_TV, teacher_TV, 2)
    filled_TK = (
        torch.cat([student_TK, student_TK[:, :1]], 1),
        torch.cat([teacher_TK, 0 * teacher_TK[:, :1] - math.inf], 1),
    )
    torch.testing.assert_close(
        top_k_distillation(*filled_TK, mask_T, **options)[0],
        top_k_distillation(student_TK, teacher_TK, mask_T, **options)[0],
    )


@every_setting
@pytest.mark.parametrize("logprobs", [[0.0, -math.inf], [-1e-9, -200.0], [-math.log(2), -math.log(2)]])
def test_certain_and_impossible_tokens_give_finite_losses(options: dict[str, Any], logprobs: list[float]) -> None:
    for ours, theirs in ((logprobs, [-0.3, -2.0]), ([-0.3, -2.0], logprobs), (logprobs, logprobs[::-1])):
        student_TK = torch.tensor([ours], requires_grad=True)
        losses_T, _ = top_k_distillation(student_TK, torch.tensor([theirs]), torch.ones(1), **options)
        (gradient_TK,) = torch.autograd.grad(losses_T.sum(), student_TK)
        assert torch.isfinite(losses_T).all()
        assert torch.isfinite(gradient_TK).all()
        assert losses_T >= -1e-6


@pytest.mark.parametrize("beta", [-0.5, 0.0, 1.0])
def test_jsd_refuses_a_share_that_leaves_one_of_the_policies_out(beta: float) -> None:
    with pytest.raises(ValueError, match="use forward_kl or reverse_kl"):
        top_k_distillation(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1), divergence="jsd", beta=beta)


def _same_gradients(
    losses_T: torch.Tensor, logits_TV: torch.Tensor, expected_T: torch.Tensor, exact_TV: torch.Tensor, tolerance: float
) -> None:
    weights_T = torch.linspace(0.5, 1.5, TOKENS, dtype=torch.float64)
    got_TV = torch.autograd.grad((losses_T * weights_T.to(losses_T.dtype)).sum(), logits_TV)[0]
    wanted_TV = torch.autograd.grad((expected_T * weights_T).sum(), exact_TV)[0]
    torch.testing.assert_close(got_TV.double(), wanted_TV, rtol=tolerance, atol=tolerance)


def _numbers(metrics: Metrics) -> dict[str, float]:
    return summarize({name: float(value) for name, value in metrics.items()})
