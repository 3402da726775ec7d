"""The loss of one update as a naive float64 loop over its trained tokens, from the published equations.

There is one for every preset, and for other compositions that look at the whole update.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch


class Token(NamedTuple):
    """A trained token; logprobs are float64 scalars, the current one with gradient."""

    current: torch.Tensor
    proximal: float
    behavior: float
    advantage: float
    lag: int
    reference: float = 0.0
    teacher: float = 0.0
    candidates: Sequence[tuple[torch.Tensor, float]] = ()
    """The policy's own logprob and the teacher's, for each token that the teacher finds likeliest in this place."""
    entropy: torch.Tensor | None = None
    """The entropy of the policy's distribution in this place, with gradient, where the loss has a bonus for it."""


Response = Sequence[Token]
MAX_NEW_TOKENS = 16


def loss_of(name: str, responses: Sequence[Response]) -> torch.Tensor:
    """Return the loss of all responses of the update; those without a trained token do not count."""
    responses = [response for response in responses if response]
    if name in OF_PAIRS:
        pairs = list(zip(responses[0::2], responses[1::2], strict=True))
        return torch.stack([OF_PAIRS[name](*pair) for pair in pairs]).mean()
    surrogate, aggregate = LOSSES[name]
    losses = [surrogate(response) for response in responses]
    if name in WHOLE:
        losses = WHOLE[name](responses, losses)
    return aggregate(losses)


def exp(log_ratio: torch.Tensor) -> torch.Tensor:
    return torch.exp(log_ratio.clamp(-20, 20))


def value(log_ratio: torch.Tensor) -> float:
    return float(exp(log_ratio.detach()))


def clip(ratio: torch.Tensor, advantage: float, low: float = 0.2, high: float = 0.2) -> torch.Tensor:
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


Losses = list[torch.Tensor]


def behavior_clip(low: float = 0.2, high: float = 0.2) -> Callable[[Response], Losses]:
    return lambda tokens: [clip(exp(t.current - t.behavior), t.advantage, low, high) for t in tokens]


def proximal_clip(weight: Callable[[Response, Token], float]) -> Callable[[Response], Losses]:
    return lambda tokens: [weight(tokens, t) * clip(exp(t.current - t.proximal), t.advantage) for t in tokens]


def distilled(student: Callable[[Token], float]) -> Callable[[Response], Losses]:
    """Return losses whose advantage is the reverse KL of each token, with its sign turned."""
    clipped = proximal_clip(lambda _, t: min(lag_ratio(t), 2.0))
    return lambda tokens: clipped([t._replace(advantage=t.advantage + t.teacher - student(t)) for t in tokens])


def with_teacher(
    surrogate: Callable[[Response], Losses], weight: Callable[[Token], float], coefficient: float = 0.5
) -> Callable[[Response], Losses]:
    """Return half the estimate of KL(pi || teacher) beside another loss, weighed for the age of the sample."""

    def taught(tokens: Response) -> Losses:
        gaps = [float(t.current.detach()) - t.teacher for t in tokens]
        losses = zip(surrogate(tokens), tokens, gaps, strict=True)
        return [one + coefficient * weight(t) * gap * t.current for one, t, gap in losses]

    return taught


def over_candidates(
    surrogate: Callable[[Response], Losses], weight: Callable[[Token], float], coefficient: float = 0.5
) -> Callable[[Response], Losses]:
    """Return half of KL(pi || teacher) over the candidates, and all other tokens as one, beside another loss."""

    def divergence(t: Token) -> torch.Tensor:
        pairs = [(torch.exp(q), math.exp(p)) for q, p in t.candidates]
        others = 1 - sum((q for q, _ in pairs), torch.zeros(())), 1 - sum(p for _, p in pairs)
        return sum((q * torch.log(q / p) for q, p in (*pairs, others)), torch.zeros(()))

    return lambda tokens: [
        one + coefficient * weight(t) * divergence(t) for one, t in zip(surrogate(tokens), tokens, strict=True)
    ]


def less_entropy(surrogate: Callable[[Response], Losses], coefficient: float = 0.5) -> Callable[[Response], Losses]:
    """Return losses from which half the policy's entropy is taken."""
    return lambda tokens: [
        one - coefficient * t.entropy for one, t in zip(surrogate(tokens), tokens, strict=True) if t.entropy is not None
    ]


def gspo(tokens: Response) -> Losses:
    mean = sum((t.current - t.behavior for t in tokens), torch.zeros(())) / len(tokens)
    return [clip(exp(mean), t.advantage, 3e-4, 4e-4) for t in tokens]


def weighted(weight: Callable[[Response, Token], float]) -> Callable[[Response], Losses]:
    return lambda tokens: [-weight(tokens, t) * t.advantage * t.current for t in tokens]


def lag_ratio(t: Token) -> float:
    return math.exp(t.proximal - t.behavior)


def now_ratio(t: Token) -> float:
    return value(t.current - t.behavior)


def sequence_tis(tokens: Response, _: Token) -> float:
    return min(math.exp(sum(t.proximal - t.behavior for t in tokens)), 2.0)


def icepop(_: Response, t: Token) -> float:
    return lag_ratio(t) if 0.5 <= lag_ratio(t) <= 5 else 0.0


def topr(tokens: Response, t: Token) -> float:
    product = math.exp(sum(float(u.current.detach()) - u.behavior for u in tokens))
    return 1.0 if t.advantage >= 0 else min(product, 1.0)


def aspo(_: Response, t: Token) -> float:
    ratio = now_ratio(t)
    if t.advantage > 0:
        return 0.0 if ratio > 1.2 else min(1 / ratio, 3.0)
    return 0.0 if ratio < 0.8 else min(ratio, 3.0)


def dppo(_: Response, t: Token) -> float:
    moved = abs(math.exp(float(t.current.detach())) - math.exp(t.behavior))
    is_outward = now_ratio(t) > 1 if t.advantage > 0 else now_ratio(t) < 1
    return 0.0 if moved > 0.15 and is_outward else min(now_ratio(t), 20.0)


def sapo(tokens: Response) -> Losses:
    losses = []
    for t in tokens:
        tau = 1.0 if t.advantage > 0 else 1.05
        losses.append(-4 / tau * torch.sigmoid(tau * (exp(t.current - t.behavior) - 1)) * t.advantage)
    return losses


def a_3po(tokens: Response) -> Losses:
    losses = []
    for t in tokens:
        log_ratio, alpha = t.current - t.behavior, 1 / max(t.lag, 1)
        proximal = t.behavior + (1 - alpha) * float(log_ratio.detach())
        losses.append(math.exp(proximal - t.behavior) * clip(exp(t.current - proximal), t.advantage))
    return losses


def with_mean_one(ratio: Callable[[Token], float]) -> Callable[[Sequence[Response], Sequence[Losses]], list[Losses]]:
    def normalized(responses: Sequence[Response], losses: Sequence[Losses]) -> list[Losses]:
        weights = [min(ratio(t), 2.0) for tokens in responses for t in tokens]
        return [[one / (sum(weights) / len(weights)) for one in ones] for ones in losses]

    return normalized


def within_second_moment(responses: Sequence[Response], losses: Sequence[Losses], budget: float = 0.04) -> list[Losses]:
    """Return M2PO's mask: the furthest outward tokens of the update go first, until the rest's mean square fits."""
    moved = [[float(t.current.detach()) - t.behavior for t in tokens] for tokens in responses]
    rows = list(zip(responses, moved, strict=True))
    outward = [abs(x) for tokens, xs in rows for t, x in zip(tokens, xs, strict=True) if x * t.advantage > 0]
    while outward and sum(x * x for x in outward) / len(outward) > budget:
        outward.remove(max(outward))
    limit = max(outward, default=0.0)
    return [
        [0 * one if x * t.advantage > 0 and abs(x) > limit else one for t, x, one in zip(tokens, xs, ones, strict=True)]
        for (tokens, xs), ones in zip(rows, losses, strict=True)
    ]


def token_mean(losses: Sequence[Losses]) -> torch.Tensor:
    return torch.stack([one for row in losses for one in row]).mean()


def sequence_mean(losses: Sequence[Losses]) -> torch.Tensor:
    return torch.stack([torch.stack(row).mean() for row in losses]).mean()


def sequence_sum(losses: Sequence[Losses]) -> torch.Tensor:
    return torch.stack([torch.stack(row).sum() for row in losses]).mean()


def fixed_denominator(losses: Sequence[Losses]) -> torch.Tensor:
    return torch.stack([torch.stack(row).sum() for row in losses]).sum() / (len(losses) * MAX_NEW_TOKENS)


LOSSES: dict[str, tuple[Callable[[Response], Losses], Callable[[Sequence[Losses]], torch.Tensor]]] = {
    "grpo": (behavior_clip(), token_mean),
    "dr_grpo": (behavior_clip(), fixed_denominator),
    "dapo": (behavior_clip(high=0.28), token_mean),
    "gspo": (gspo, sequence_mean),
    "gspo_token": (gspo, sequence_mean),
    "cispo": (weighted(lambda _, t: min(now_ratio(t), 5.0)), token_mean),
    "rloo": (weighted(lambda _, t: min(now_ratio(t), 2.0)), sequence_sum),
    "rloo_sequence_mean": (weighted(lambda _, t: min(now_ratio(t), 2.0)), sequence_mean),
    "reinforce_plus_plus": (behavior_clip(), token_mean),
    "reinforce_plus_plus_baseline": (behavior_clip(), token_mean),
    "ppo": (behavior_clip(), token_mean),
    "topr": (weighted(topr), sequence_sum),
    "topr_sequence_mean": (weighted(topr), sequence_mean),
    "aspo": (weighted(aspo), token_mean),
    "sapo": (sapo, sequence_mean),
    "dppo": (weighted(dppo), token_mean),
    "decoupled_ppo": (proximal_clip(lambda _, t: lag_ratio(t)), token_mean),
    "a_3po": (a_3po, token_mean),
    "tis": (proximal_clip(lambda _, t: min(lag_ratio(t), 2.0)), token_mean),
    "sequence_tis": (proximal_clip(sequence_tis), token_mean),
    "icepop": (proximal_clip(icepop), token_mean),
    "distillation": (with_teacher(behavior_clip(), now_ratio, 1.0), token_mean),
    "distillation_advantage": (distilled(lambda t: t.proximal), token_mean),
    "stale_distillation": (
        lambda tokens: behavior_clip()(
            [t._replace(advantage=t.advantage + 0.5 * (t.teacher - t.behavior)) for t in tokens]
        ),
        token_mean,
    ),
    "distillation_loss": (
        with_teacher(
            proximal_clip(lambda _, t: min(lag_ratio(t), 2.0)),
            lambda t: value(t.current - t.proximal) * min(lag_ratio(t), 2.0),
        ),
        token_mean,
    ),
    "stale_distillation_loss": (with_teacher(behavior_clip(), now_ratio), token_mean),
    "plain_distillation_loss": (
        with_teacher(weighted(lambda _, t: min(now_ratio(t), 2.0)), lambda t: min(now_ratio(t), 2.0)),
        sequence_sum,
    ),
    "candidates": (
        over_candidates(
            proximal_clip(lambda _, t: min(lag_ratio(t), 2.0)),
            lambda t: min(lag_ratio(t), 2.0),
        ),
        token_mean,
    ),
    "entropy": (less_entropy(proximal_clip(lambda _, t: min(lag_ratio(t), 2.0))), sequence_mean),
    "m2po": (lambda tokens: [-exp(t.current - t.behavior) * t.advantage for t in tokens], token_mean),
    "self_normalized": (weighted(lambda _, t: min(now_ratio(t), 2.0)), token_mean),
    "clipped_self_normalized": (proximal_clip(lambda _, t: min(lag_ratio(t), 2.0)), token_mean),
    "decoupled_m2po": (proximal_clip(lambda _, t: lag_ratio(t)), token_mean),
    "clipped_m2po": (behavior_clip(), token_mean),
}
WHOLE = {
    "m2po": within_second_moment,
    "self_normalized": with_mean_one(now_ratio),
    "clipped_self_normalized": with_mean_one(lag_ratio),
    "decoupled_m2po": within_second_moment,
    "clipped_m2po": within_second_moment,
}
"""Functions of the losses of all tokens of an update together."""


Pair = Callable[[Response, Response], torch.Tensor]


def dpo(chosen: Response, rejected: Response, beta: float = 0.1) -> torch.Tensor:
    """Rafailov et al. 2023, equation 7."""
    rewards = [beta * sum((t.current - t.reference for t in one), torch.zeros(())) for one in (chosen, rejected)]
    return -torch.log(1 / (1 + torch.exp(rewards[1] - rewards[0])))


def ipo(chosen: Response, rejected: Response, beta: float = 0.1) -> torch.Tensor:
    """Azar et al. 2023, equation 17, with the mean over the tokens of a response."""
    means = [sum((t.current - t.reference for t in one), torch.zeros(())) / len(one) for one in (chosen, rejected)]
    return (means[0] - means[1] - 1 / (2 * beta)) ** 2


def weighed_dpo(chosen: Response, rejected: Response) -> torch.Tensor:
    ratio = math.exp(sum(float(t.current.detach()) - t.behavior for t in (*chosen, *rejected)))
    return min(ratio, 2.0) * dpo(chosen, rejected)


OF_PAIRS: dict[str, Pair] = {"online_dpo": dpo, "online_ipo": ipo, "weighed_online_dpo": weighed_dpo}
"""The losses of one pair."""
