"""Losses on given tokens: cross-entropy (SFT), and distillation from a teacher's logprobs of the sampled token or of
the k tokens that the teacher finds likeliest.

They are 0 where the mask is 0, and are aggregated as an objective's losses are.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch

from .metrics import Metrics, by_lag, masked_mean
from .ratios import MAX_LOG_RATIO, token_log_ratio
from .tokens import Tokens, trained

MIN_LOGPROB = -100.0
"""Below it a probability counts as exp(-100), so that a token that a policy excludes leaves the loss finite."""


def reverse_kl_distillation(
    current_logprobs_T: torch.Tensor, teacher_logprobs_T: torch.Tensor, tokens: Tokens
) -> tuple[torch.Tensor, Metrics]:
    """loss_t = sg(log pi(y_t) - log teacher(y_t)) log pi(y_t).

    sg stops the gradient. On samples of the student pi this is the policy gradient with advantage
    log teacher(y_t) - log pi(y_t): in expectation the gradient of KL(pi || teacher) at each prefix. Later tokens are
    not charged to earlier ones. On stale samples it needs an importance weight, like any policy gradient; the
    objective gives it one (`learner.objective.loss`). The logarithm of the ratio is clamped to +-20. The loss's
    value says little; watch the metric `reverse_kl`, also by lag: the mean of log pi - log teacher.

    Source: Thinking Machines 2025, "On-Policy Distillation"; Agarwal et al. 2023 (GKD, arXiv:2306.13649), who sum the
    divergence over the whole vocabulary where this takes the sampled token's.
    """
    log_ratio_T = token_log_ratio(current_logprobs_T, teacher_logprobs_T, tokens.loss_mask_T).detach()
    losses_T = log_ratio_T * trained(current_logprobs_T, tokens.loss_mask_T)
    return losses_T, _reverse_kl_of_samples(log_ratio_T, tokens)


def teacher_advantages(
    student_logprobs_T: torch.Tensor, teacher_logprobs_T: torch.Tensor, tokens: Tokens, *, coefficient: float = 1.0
) -> tuple[torch.Tensor, Metrics]:
    """A'_t = A_t + coefficient (log teacher(y_t) - log student(y_t)).

    On-policy distillation as a policy gradient: on samples of the student, with A_t = 0, the expected gradient is that
    of -coefficient KL(student || teacher) at each prefix; later tokens are not charged to earlier ones. A_t is the
    advantage of the task's rewards. The student is the policy that the objective's ratio is anchored to: behavior, or
    proximal, which is the learner's before the step; with one update a step that is the policy that is trained, and
    the gradient is exact under importance weights, however old the samples are. The logarithm of the ratio is clamped
    to +-20, and has no gradient. Metric, also by lag: `reverse_kl`, the mean of log student - log teacher over trained
    tokens, an estimate of the divergence on the sampler's tokens.

    Source: Thinking Machines 2025, "On-Policy Distillation", whose loss has the negative reverse KL of each token as
    its advantage; GKD, Agarwal et al. 2023 (arXiv:2306.13649), section 3, which adds the divergence to a reward.
    """
    log_ratio_T = token_log_ratio(student_logprobs_T, teacher_logprobs_T, tokens.loss_mask_T).detach()
    return tokens.trained_advantages - coefficient * log_ratio_T, _reverse_kl_of_samples(log_ratio_T, tokens)


def _reverse_kl_of_samples(log_ratio_T: torch.Tensor, tokens: Tokens) -> Metrics:
    sums = {"reverse_kl_sum": log_ratio_T, "reverse_kl_count": torch.ones_like(log_ratio_T)}
    return {**masked_mean("reverse_kl", log_ratio_T, tokens.loss_mask_T), **by_lag(sums, tokens)}


def top_k_distillation(
    current_logprobs_TK: torch.Tensor,
    teacher_logprobs_TK: torch.Tensor,
    loss_mask_T: torch.Tensor,
    *,
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl",
    beta: float = 0.5,
) -> tuple[torch.Tensor, Metrics]:
    """loss_t = sum_b D_b over the k tokens and the rest; forward_kl: D = p log(p / q); reverse_kl: D = q log(q / p);
    jsd: D = beta p log(p / m) + (1 - beta) q log(q / m), m = beta p + (1 - beta) q; p is the teacher, q the student pi.

    Both inputs are [T, K]: what student and teacher would have given the K tokens that the teacher found likeliest in
    the place of token t. A teacher's logprob of -inf fills a place without a token, which counts for neither. All
    other tokens of the vocabulary are one bucket, with the probability that is left, at least exp(-20). The loss is
    exact where K is the vocabulary. Otherwise it is too small, by the divergence within the bucket: p_rest times
    KL(teacher || pi) among the other tokens for forward_kl, pi_rest times KL(pi || teacher) for reverse_kl. So it
    teaches how much probability the other tokens have together, and nothing about which of them has it; that matters
    least for forward_kl with a small p_rest. The forward KL covers all that the teacher does, the reverse KL keeps to
    what the teacher finds likely, and jsd lies between: beta near 0 is like forward_kl, near 1 like reverse_kl.

    No gradient flows to the teacher, nor through the choice of the tokens that led here. Metrics: the mean divergence,
    by its name, and `teacher_rest` and `student_rest`, the mean probabilities of the bucket. Raises ValueError for
    jsd unless 0 < beta < 1.

    Source: forward_kl: Hinton et al. 2015 (arXiv:1503.02531); reverse_kl and jsd: GKD, Agarwal et al. 2023
    (arXiv:2306.13649), equation 1. forward_kl is our default; beta 0.5 is TRL's for its GKD trainer, whose beta of 0
    and 1 stand for forward_kl and reverse_kl.
    """
    if divergence == "jsd" and not 0 < beta < 1:
        raise ValueError(f"beta is {beta}; jsd needs more than 0 and less than 1: use forward_kl or reverse_kl there.")
    is_listed_TK = (teacher_logprobs_TK > -math.inf) & (loss_mask_T > 0)[:, None]
    student_TB = _with_rest(current_logprobs_TK, is_listed_TK)
    teacher_TB = _with_rest(teacher_logprobs_TK.detach(), is_listed_TK)
    losses_T = trained(_DIVERGENCES[divergence](student_TB, teacher_TB, beta).sum(-1), loss_mask_T)
    return losses_T, {
        **masked_mean(divergence, losses_T, loss_mask_T),
        **masked_mean("teacher_rest", teacher_TB[:, -1].exp(), loss_mask_T),
        **masked_mean("student_rest", student_TB[:, -1].exp(), loss_mask_T),
    }


def _with_rest(logprobs_TK: torch.Tensor, is_listed_TK: torch.Tensor) -> torch.Tensor:
    """[T, K + 1] with the logprob of all other tokens together in the last column."""
    absent_TK = torch.full_like(logprobs_TK, MIN_LOGPROB)
    listed_TK = torch.where(is_listed_TK, logprobs_TK, absent_TK).clamp(min=MIN_LOGPROB)
    listed_T = listed_TK.logsumexp(-1).clamp(max=-math.exp(-MAX_LOG_RATIO))
    return torch.cat([listed_TK, torch.log(-torch.expm1(listed_T))[:, None]], dim=-1)


def _forward_kl(student: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    return teacher.exp() * (teacher - student)


def _reverse_kl(student: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    return student.exp() * (student - teacher)


def _jsd(student: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * teacher.exp() * (teacher - mixture) + (1 - beta) * student.exp() * (student - mixture)


_DIVERGENCES: dict[str, Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]] = {
    "forward_kl": _forward_kl,
    "reverse_kl": _reverse_kl,
    "jsd": _jsd,
}

DISTILLATION: dict[str, Callable[..., tuple[torch.Tensor, Metrics]]] = {
    "reverse_kl_distillation": reverse_kl_distillation,
    "teacher_advantages": teacher_advantages,
    "top_k_distillation": top_k_distillation,
}


def sft(current_logprobs_T: torch.Tensor, loss_mask_T: torch.Tensor) -> torch.Tensor:
    """loss_t = -log pi(y_t).

    Cross-entropy with the given tokens. `token_mean` aggregation is the usual loss of a batch.

    Source: maximum likelihood; supervised fine-tuning as in InstructGPT, Ouyang et al. 2022 (arXiv:2203.02155).
    """
    return -trained(current_logprobs_T, loss_mask_T)
