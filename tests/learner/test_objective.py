# mypy: disable-error-code="arg-type, misc, union-attr"
"""The composition of a loss: shares add up however the batch is cut, names are checked, and reports combine."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from headway.algorithms.metrics import summarize, summarize_by_lag
from headway.algorithms.presets import PRESETS
from headway.algorithms.tokens import spread
from headway.broker.errors import ConfigError, HeadwayError
from headway.broker.schema import Group, Prompt, Trajectory, TrajectoryId
from headway.learner.algorithm_config import AdvantageConfig, AlgorithmConfig, RewardShapingConfig
from headway.learner.batching.batch import PackedBatch
from headway.learner.objective import composition
from headway.learner.objective.composition import open_advantage, open_corrections
from headway.learner.objective.loss import Objective, supervised_loss, whole_report
from headway.learner.objective.shaping import MOST_NAMES, group_advantages, reward_stats, shaped_rewards

LENGTHS = (5, 1, 12, 3, 7, 4)
KL = {"kl": {"kind": "k3", "coefficient": 0.1}}
COMPOSITIONS: dict[str, dict[str, object]] = {
    **{name: preset.algorithm for name, preset in PRESETS.items()},
    "everything": {**PRESETS["tis"].algorithm, **KL, "aggregation": {"kind": "sequence_mean"}},
    "pg": {
        "objective": {"kind": "policy_gradient"},
        "corrections": [{"kind": "sequence_truncated_is", "options": {"cap": 1.5}}],
    },
    "self_normalized": {
        "objective": {"kind": "ppo_clip", "anchor": "proximal"},
        "corrections": [{"kind": "self_normalized_is"}, {"kind": "age_weight"}, {"kind": "veto"}],
    },
    "taught_m2po": {**PRESETS["m2po"].algorithm, "distillation": {"coefficient": 0.3, "place": "advantage"}},
    "taught_later_m2po": {
        "objective": {"kind": "ppo_clip", "anchor": "proximal"},
        "corrections": [{"kind": "m2po"}],
        "distillation": {"coefficient": 0.3, "place": "advantage"},
    },
    "distillation_loss": {**PRESETS["grpo"].algorithm, "distillation": {"coefficient": 0.5, "place": "loss"}},
    "candidates": {
        **PRESETS["tis"].algorithm,
        "distillation": {"coefficient": 0.5, "place": "loss", "top_k": 3, "divergence": "jsd"},
    },
    "entropy": {**PRESETS["tis"].algorithm, **KL, "entropy_coefficient": 0.2},
    "weighed_online_dpo": {
        **PRESETS["online_dpo"].algorithm,
        "corrections": [{"kind": "pair_truncated_is", "options": {"cap": 1.2}}],
    },
    "own": {
        "objective": {"kind": f"{__name__}:own_objective", "options": {"scale": 2.0}},
        "corrections": [{"kind": f"{__name__}:own_mask"}],
    },
}
every_composition = pytest.mark.parametrize("name", COMPOSITIONS)
Split = Sequence[Sequence[int]]


def own_objective(current_T, anchor_T, tokens, *, scale):  # type: ignore[no-untyped-def]
    metrics = {"own_sum": tokens.loss_mask_T.sum() * scale, "own_count": tokens.loss_mask_T.sum()}
    return -scale * tokens.advantages_T * current_T, metrics


def own_mask(policy_T, tokens):  # type: ignore[no-untyped-def]
    return (policy_T > tokens.behavior_logprobs_T).float(), {}


def own_advantage(rewards_S, group_S):  # type: ignore[no-untyped-def]
    return rewards_S * 10, {}


def algorithm(raw: dict[str, object]) -> AlgorithmConfig:
    return msgspec.convert(raw, AlgorithmConfig)


def cut(objective: Objective, split: Split) -> Split:
    """Return the split, or for a loss of pairs one of whole pairs: each pair goes where its chosen response was."""
    if not objective.is_of_pairs:
        return split
    return [[s for chosen in part if chosen % 2 == 0 for s in (chosen, chosen + 1)] for part in split]


class Whole:
    """One ragged batch with the logprobs of all policies, and any part of it as a PackedBatch."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        total = sum(LENGTHS)
        self.bounds = np.cumsum([0, *LENGTHS]).tolist()
        self.mask_T = (torch.rand(total, generator=generator) < 0.7).float()
        self.mask_T[self.bounds[3] : self.bounds[4]] = 0
        self.behavior_T = -2 * torch.rand(total, generator=generator) * self.mask_T
        self.proximal_T, self.reference_T, self.current_T = (
            self.behavior_T + 0.3 * torch.randn(total, generator=generator) for _ in range(3)
        )
        self.teacher_T = self.behavior_T / 2
        self.teacher_TC: torch.Tensor | None = None
        self.has_entropies = False
        advantages_S = torch.randn(len(LENGTHS), generator=generator)
        self.advantages_T = spread(advantages_S, torch.tensor(self.bounds)) * self.mask_T

    def with_candidates(self) -> "Whole":
        """Add three candidates of a teacher, for which the policy reports its own logprobs."""
        generator = torch.Generator().manual_seed(1)
        logprobs_PTV = torch.randn(2, len(self.mask_T), 7, generator=generator).log_softmax(-1)
        self.teacher_TC, chosen_TC = logprobs_PTV[1].topk(3)
        largest_T, candidates_TC = logprobs_PTV[0].amax(1), logprobs_PTV[0].gather(1, chosen_TC)
        self.current_T = torch.cat([self.current_T[:, None], largest_T[:, None], candidates_TC], dim=1)
        return self

    def with_entropies(self) -> "Whole":
        """Let the policy report the entropies of its distributions."""
        generator = torch.Generator().manual_seed(1)
        logprobs_TV = torch.randn(len(self.mask_T), 7, generator=generator).log_softmax(-1)
        entropy_T = -(logprobs_TV.exp() * logprobs_TV).sum(1)
        self.current_T = torch.stack([self.current_T, logprobs_TV.amax(1), entropy_T], dim=1)
        self.has_entropies = True
        return self

    def spoil(self, garbage: float) -> None:
        """Put this value at all masked places."""
        for name in ("behavior_T", "proximal_T", "reference_T", "current_T", "advantages_T", "teacher_T"):
            values_T = getattr(self, name).clone()
            values_T[self.mask_T == 0] = garbage
            setattr(self, name, values_T)

    def part(self, sequences: Sequence[int]) -> tuple[PackedBatch, torch.Tensor]:
        """Return the batch of these sequences, in this order, and the places of its tokens in the whole."""
        places = [t for s in sequences for t in range(self.bounds[s], self.bounds[s + 1])]
        index_T = torch.tensor(places, dtype=torch.int64)
        lengths = [LENGTHS[s] for s in sequences]
        batch = PackedBatch(
            token_ids_T=torch.zeros_like(index_T),
            position_ids_T=torch.tensor([t for length in lengths for t in range(length)], dtype=torch.int64),
            cu_seqlens=torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32),
            loss_mask_T=self.mask_T[index_T],
            behavior_logprobs_T=self.behavior_T[index_T],
            advantages_T=self.advantages_T[index_T],
            lags_T=index_T % 4,
            teacher_logprobs_T=self.teacher_T[index_T],
            teacher_logprobs_TC=None if self.teacher_TC is None else self.teacher_TC[index_T],
            wants_confidence=self.has_entropies,
        )
        return batch, index_T

    def reports(self, objective: Objective, split: Sequence[Sequence[int]]) -> list[dict[str, float]]:
        """Return the report of each micro-batch."""
        parts = [self.part(sequences) for sequences in cut(objective, split)]
        logprobs = [[policy_T[i] for _, i in parts] for policy_T in (self.proximal_T, self.reference_T, self.current_T)]
        proximal, reference, current = logprobs
        loss = objective.token_loss(
            [batch for batch, _ in parts],
            proximal_logprobs=proximal,
            reference_logprobs=reference,
            current_logprobs=current,
        )
        return [loss(number, current_T)[1] for number, current_T in enumerate(current)]

    def train(
        self, objective: Objective, split: Sequence[Sequence[int]]
    ) -> tuple[float, torch.Tensor, dict[str, float]]:
        """Return (loss, gradient by token of the whole, metrics) of one update cut into micro-batches by `split`."""
        current_T = self.current_T.clone().requires_grad_()
        parts = [self.part(sequences) for sequences in cut(objective, split)]
        loss = objective.token_loss(
            [batch for batch, _ in parts],
            proximal_logprobs=[self.proximal_T[i] for _, i in parts] if objective.needs_proximal else None,
            reference_logprobs=[self.reference_T[i] for _, i in parts] if objective.needs_reference else None,
            current_logprobs=[self.current_T[i] for _, i in parts] if objective.needs_current else None,
        )
        total, reports = 0.0, []
        for number, (_, index_T) in enumerate(parts):
            share, report = loss(number, current_T[index_T])
            share.backward()
            total += float(share.detach())
            reports.append(report)
        assert current_T.grad is not None
        return total, current_T.grad, objective.combine_reports(reports)


def opened(name: str) -> tuple[Whole, Objective]:
    made = {"candidates": Whole.with_candidates, "entropy": Whole.with_entropies}.get(name, lambda whole: whole)
    return made(Whole()), Objective(algorithm(COMPOSITIONS[name]))


@every_composition
@pytest.mark.parametrize("split", [[[0], [1], [2], [3], [4], [5]], [[5, 3, 1], [], [0, 2, 4]], [[4, 0], [1, 2, 3, 5]]])
def test_any_split_gives_the_same_loss_gradient_and_metrics(name: str, split: list[list[int]]) -> None:
    whole, objective = opened(name)
    loss, gradient_T, metrics = whole.train(objective, [range(len(LENGTHS))])
    split_loss, split_gradient_T, split_metrics = whole.train(objective, split)
    assert split_loss == pytest.approx(loss, rel=1e-6, abs=1e-6)
    torch.testing.assert_close(split_gradient_T, gradient_T, rtol=1e-6, atol=1e-6)
    assert split_metrics == pytest.approx(metrics, rel=1e-5)
    assert gradient_T.abs().sum() > 0
    assert gradient_T[whole.mask_T == 0].abs().sum() == 0


@pytest.mark.parametrize("name", sorted(COMPOSITIONS.keys() - {"own"}))
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
def test_what_stands_at_masked_places_changes_nothing(name: str, garbage: float) -> None:
    whole, objective = opened(name)
    split = [[4, 0], [1, 2, 3, 5]]
    loss, gradient_T, metrics = whole.train(objective, split)
    whole.spoil(garbage)
    spoiled_loss, spoiled_gradient_T, spoiled_metrics = whole.train(objective, split)
    assert (spoiled_loss, spoiled_metrics) == (loss, metrics)
    assert torch.equal(spoiled_gradient_T, gradient_T)


@every_composition
def test_sums_by_lag_are_those_over_all_tokens_however_they_are_split(name: str) -> None:
    whole, objective = opened(name)
    reports = [whole.reports(objective, split) for split in ([range(6)], [[5, 3, 1], [], [0, 2, 4]])]
    all_tokens, of_parts = (whole_report(report) for report in reports)
    assert of_parts == pytest.approx(all_tokens, rel=1e-5, abs=1e-9)
    by_lag, figures = summarize_by_lag(all_tokens), summarize(all_tokens)
    assert len(by_lag) > 1
    tokens = {lag: all_tokens[f"by_lag/{lag}/weight_count"] for lag in by_lag}
    assert sum(tokens.values()) == float(whole.mask_T.sum())
    for figure in ("ratio_mean", "clip_fraction", "mask_fraction"):
        if figure in figures:
            mean = sum(tokens[lag] * of_lag[figure] for lag, of_lag in by_lag.items()) / sum(tokens.values())
            assert mean == pytest.approx(figures[figure], rel=1e-5), figure
    weights = [tokens[lag] * of_lag["ratio_mean"] for lag, of_lag in by_lag.items()]
    squares = [tokens[lag] * of_lag["ratio_mean"] ** 2 / of_lag["ess"] for lag, of_lag in by_lag.items()]
    assert sum(weights) ** 2 / (sum(tokens.values()) * sum(squares)) == pytest.approx(figures["ess"], rel=1e-5)


@every_composition
def test_two_ranks_give_what_one_gives(name: str) -> None:
    whole, objective = opened(name)
    loss, gradient_T, metrics = whole.train(objective, [range(len(LENGTHS))])
    ranks = [whole.part(sequences) for sequences in cut(objective, [[0, 1, 2], [3, 4, 5]])]
    asked: list[list[Sequence[float]]] = [[], []]  # what each rank has to add up, in order
    for mine, (batch, i) in zip(asked, ranks, strict=True):
        objective.token_loss(
            [batch],
            lambda values, mine=mine: mine.append(values) or values,
            [whole.proximal_T[i]],
            [whole.reference_T[i]],
            [whole.current_T[i]],
        )
    added = [[sum(column) for column in zip(*values, strict=True)] for values in zip(*asked, strict=True)]
    current_T, shares, reports = whole.current_T.clone().requires_grad_(), [], []
    for batch, i in ranks:
        sums = iter(added)
        token_loss = objective.token_loss(
            [batch],
            lambda _, sums=sums: next(sums),
            [whole.proximal_T[i]],
            [whole.reference_T[i]],
            [whole.current_T[i]],
        )
        share, report = token_loss(0, current_T[i])
        shares.append(share)
        reports.append(report)
    assert float(sum(shares).detach()) == pytest.approx(loss, abs=1e-6)
    torch.testing.assert_close(torch.autograd.grad(sum(shares), current_T)[0], gradient_T, rtol=1e-6, atol=1e-6)
    assert set(objective.combine_reports(reports)) == set(metrics)


def test_reports_combine_over_ranks_by_sums_and_maxima() -> None:
    theirs = {"clip_fraction_count": 3.0, "clip_fraction_sum": 1.0, "ratio_max": 7.0}
    mine = [
        {"clip_fraction_sum": 1.0, "clip_fraction_count": 4.0, "ratio_max": 2.0},
        {"clip_fraction_count": 1.0},
    ]
    combined = Objective.combine_reports(
        mine,
        lambda values: [value + theirs[name] for value, name in zip(values, sorted(theirs)[:2], strict=True)],
        lambda values: [max(value, theirs["ratio_max"]) for value in values],
    )
    assert combined == {"clip_fraction": 2 / 8, "ratio_max": 7.0}


@every_composition
def test_an_empty_micro_batch_has_a_loss_to_go_back_from(name: str) -> None:
    objective = Objective(algorithm(COMPOSITIONS[name]))
    batch, _ = Whole().part([])
    nothing = torch.zeros(0)
    current_T = torch.zeros(0, requires_grad=True)
    token_loss = objective.token_loss(
        [batch], proximal_logprobs=[nothing], reference_logprobs=[nothing], current_logprobs=[nothing]
    )
    share, _ = token_loss(0, current_T)
    share.backward()
    assert float(share.detach()) == 0
    assert current_T.grad is not None


def test_the_composition_is_the_equation() -> None:
    """The equation is decoupled PPO with KL, as a float64 loop."""
    whole, config = Whole(), algorithm({**PRESETS["decoupled_ppo"].algorithm, **KL})
    loss, _, _ = whole.train(Objective(config), [range(len(LENGTHS))])
    expected, tokens = 0.0, float(whole.mask_T.sum())
    for s in range(len(LENGTHS)):
        for t in range(whole.bounds[s], whole.bounds[s + 1]):
            if whole.mask_T[t] > 0:
                current, proximal, behavior, reference = (
                    float(x[t]) for x in (whole.current_T, whole.proximal_T, whole.behavior_T, whole.reference_T)
                )
                advantage, ratio = float(whole.advantages_T[t]), np.exp(current - proximal)
                surrogate = min(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage)
                penalty = np.exp(reference - current) - 1 - (reference - current)
                expected += (-np.exp(proximal - behavior) * surrogate + 0.1 * penalty) / tokens
    assert loss == pytest.approx(expected, abs=1e-6)


def test_on_policy_every_ratio_is_one() -> None:
    whole = Whole()
    whole.current_T = whole.behavior_T
    _, _, metrics = whole.train(Objective(AlgorithmConfig()), [[0, 1, 2], [3, 4, 5]])
    assert metrics["ratio_max_deviation"] == 0
    assert metrics["ess"] == pytest.approx(1)
    assert (metrics["ratio_mean"], metrics["ratio_max"], metrics["kl_behavior"]) == (1, 1, 0)
    assert (metrics["clip_fraction"], metrics["mask_fraction"]) == (0, 0)


def test_with_one_update_the_current_policy_is_the_proximal_one() -> None:
    whole, config = Whole(), algorithm(COMPOSITIONS["tis"])
    lean = Objective(config, is_one_update=True)
    assert not lean.needs_proximal
    assert Objective(config).needs_proximal
    whole.proximal_T = whole.current_T
    expected, got = (whole.train(o, [range(len(LENGTHS))]) for o in (Objective(config), lean))
    assert got[0] == pytest.approx(expected[0])
    assert torch.equal(got[1], expected[1])
    assert got[2] == pytest.approx(expected[2])


@pytest.mark.parametrize("corrections", [[{"kind": "truncated_is"}], [{"kind": "self_normalized_is"}]])
def test_an_objective_without_a_ratio_is_weighed_by_the_current_policy_whatever_its_anchor(
    corrections: list[object],
) -> None:
    whole = Whole()
    losses = [
        whole.train(
            Objective(
                algorithm({"objective": {"kind": "policy_gradient", "anchor": anchor}, "corrections": corrections})
            ),
            [[0, 1, 2], [3, 4, 5]],
        )[0]
        for anchor in ("behavior", "proximal")
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    "name", ["grpo", "dapo", "gspo", "aspo", "tis", "sequence_tis", "icepop", "decoupled_ppo", "m2po"]
)
def test_an_earlier_update_that_pushed_all_tokens_too_far_leaves_later_ones_no_gradient(name: str) -> None:
    whole = Whole()
    whole.proximal_T = whole.behavior_T
    whole.current_T = whole.behavior_T + whole.advantages_T.sign()
    _, gradient_T, _ = whole.train(Objective(algorithm(COMPOSITIONS[name])), [[0, 1, 2], [3, 4, 5]])
    assert gradient_T.abs().sum() == 0


def test_own_metrics_are_reported() -> None:
    _, _, metrics = Whole().train(Objective(algorithm(COMPOSITIONS["own"])), [[0, 1, 2], [3, 4, 5]])
    assert metrics["own"] == pytest.approx(2)
    assert 0 < metrics["mask_fraction"] < 1


def test_supervised_loss_is_the_mean_cross_entropy() -> None:
    whole = Whole()
    parts = [whole.part([0, 1, 2]), whole.part([3, 4, 5]), whole.part([])]
    loss = supervised_loss([batch for batch, _ in parts])
    shares, reports = zip(*(loss(n, whole.current_T[i]) for n, (_, i) in enumerate(parts)), strict=True)
    expected = -float((whole.current_T * whole.mask_T).sum() / whole.mask_T.sum())
    assert float(sum(shares)) == pytest.approx(expected, abs=1e-6)
    assert Objective.combine_reports(reports) == pytest.approx({"cross_entropy": expected}, abs=1e-6)


ONLINE = PRESETS["online_dpo"].algorithm
PAIRS = ONLINE["objective"]
BEHAVIOR_PPO = {"objective": {"kind": "ppo_clip", "anchor": "behavior"}}
REFUSED = [
    ({**BEHAVIOR_PPO, "corrections": [{"kind": "decoupled"}]}, "behavior policy twice.*anchor=proximal"),
    (
        {**BEHAVIOR_PPO, "corrections": [{"kind": "truncated_is"}]},
        "behavior policy twice.*drop the correction",
    ),
    (
        {"objective": {"kind": "policy_gradient"}, "corrections": [{"kind": "decoupled"}]},
        "weighs the proximal policy.*anchor=proximal, or use truncated_is",
    ),
    (
        {"objective": {"kind": "policy_gradient", "anchor": "proximal"}, "corrections": [{"kind": "decoupled"}]},
        "policy_gradient has no ratio.*use truncated_is",
    ),
    (
        {**PRESETS["tis"].algorithm, "corrections": [{"kind": "truncated_is"}, {"kind": "decoupled"}]},
        "truncated_is and decoupled each multiply.*lag twice",
    ),
    (
        {**PRESETS["tis"].algorithm, "corrections": [{"kind": "decoupled", "options": {"cap": 5.0}}]},
        r"corrections\.options\.cap: decoupled has no such option.*Known: none",
    ),
    ({"objective": {"kind": "gspo", "options": {"clip_hi": 1}}}, "gspo has no such option; did you mean 'clip_high'"),
    ({"objective": {"kind": "gspo", "options": {"clip_high": "x"}}}, "clip_high of gspo: Expected `float`, got `str`"),
    (
        {"objective": {"kind": "ppo_clip", "options": {"dual_clip": 0.5}}},
        "dual_clip of ppo_clip is 0.5; it must be above 1",
    ),
    (
        {"corrections": [{"kind": "veto", "options": {"threshold": 0.0}}]},
        "threshold of veto is 0.0; it must be above 0",
    ),
    ({"objective": {"kind": "gspo", "options": {"clip_low": -1.0}}}, "clip_low of gspo is -1.0; it is 0 or more"),
    ({"kl": {"kind": "k1", "coefficient": 0.1}}, "expected gradient of k1 in the loss is 0"),
    ({"advantage": {"kind": "global_mean_std"}, "dynamic_sampling": 3}, "learns from them; set it to 0"),
    (
        {"objective": {"kind": "policy_gradient", "anchor": "proximal"}, "proximal": "linear"},
        "which nothing here uses",
    ),
    ({"proximal": "log_linear"}, "which nothing here uses; set algorithm.objective.anchor=proximal"),
    (
        {**PRESETS["m2po"].algorithm, "proximal": "linear"},
        "m2po looks at the whole batch.*set algorithm.proximal=recompute",
    ),
    ({"advantage": {"kind": "gae"}, "dynamic_sampling": 3}, "a critic .* learns from each of them"),
    ({**ONLINE, "objective": {**PAIRS, "options": {"beta": 0.0}}}, "beta of dpo is 0.0; it must be above 0"),
    ({**ONLINE, "objective": {**PAIRS, "options": {"label_smoothing": 0.5}}}, "must be below 0.5"),
    ({**ONLINE, "objective": {**PAIRS, "kind": "length_desensitized_dpo"}}, "needs alpha, which has no default"),
    (
        {**ONLINE, "advantage": {"kind": "gae"}},
        r"advantage\.kind=gae does not fit .*kind=dpo, which takes the best and the worst.*kind=best_against_worst",
    ),
    ({**ONLINE, "advantage": {"kind": "group_mean"}}, r"advantage\.kind=group_mean does not fit"),
    ({**ONLINE, "objective": {"kind": "dpo"}}, r"anchor=behavior does not fit.*set algorithm\.objective\.anchor=ref"),
    (
        {**ONLINE, "aggregation": {"kind": "token_mean"}},
        r"one loss for both.*set algorithm\.aggregation\.kind=pair_mean",
    ),
    ({**ONLINE, "proximal": "linear"}, r"proximal=linear does not fit.*set algorithm\.proximal=recompute"),
    (
        {**ONLINE, "corrections": [{"kind": "truncated_is"}, {"kind": "veto"}]},
        "truncated_is and veto would weigh single",
    ),
    ({**ONLINE, **KL}, r"kl\.coefficient=0\.1 does not fit .*set it to 0.*options\.beta"),
    ({"objective": {"anchor": "reference"}}, "anchor=reference is for losses of pairs .dpo, ipo.* ppo_clip is none"),
    ({"aggregation": {"kind": "pair_mean"}}, "pair_mean is for losses of pairs.*set it to token_mean"),
    (
        {"objective": {"kind": "policy_gradient"}, "corrections": [{"kind": "pair_truncated_is"}]},
        "weighs pairs, which policy_gradient does not have; take sequence_truncated_is",
    ),
    ({"advantage": {"kind": "none"}}, r"advantage\.kind=none leaves nothing to learn from without a teacher"),
    (
        {"distillation": {"coefficient": 1.0}, "dynamic_sampling": 2},
        "drops groups whose samples all got the same reward, but a teacher .* teaches by them",
    ),
    (
        {**ONLINE, "distillation": {"coefficient": 1.0}},
        "by single tokens, at which dpo, a loss of pairs, does not look",
    ),
    ({**ONLINE, "entropy_coefficient": 0.1}, "entropy at single tokens, at which dpo, a loss of pairs, .*set it to 0"),
    (
        {"distillation": {"coefficient": 1.0, "place": "loss", "top_k": 4}, "entropy_coefficient": 0.1},
        "entropy_coefficient=0.1 does not fit .*top_k=4: .*Set one of the two to 0",
    ),
    (
        {"distillation": {"coefficient": 1.0, "place": "advantage", "top_k": 4}},
        "top_k=4 compares whole distributions, .*place=loss",
    ),
    ({"kl": {"ema_decay": 0.9}}, "ema_decay moves a reference that kl.coefficient=0 does not use"),
    ({"objective": {"kind": "no_such_module:f"}}, "cannot import 'no_such_module'.*PYTHONPATH"),
    ({"objective": {"kind": "math:no_such"}}, "module 'math' has no 'no_such'"),
]


@pytest.mark.parametrize("place", ["advantage", "loss"])
def test_a_batch_without_the_teachers_logprobs_is_not_trained_by_them(place: str) -> None:
    distillation = {"coefficient": 1.0, "place": place}
    objective = Objective(algorithm({**PRESETS["distillation"].algorithm, "distillation": distillation}))
    whole = Whole()
    batch, _ = whole.part([0, 2])
    untaught = replace(batch, teacher_logprobs_T=None)
    policy_T = torch.zeros(batch.num_tokens)
    with pytest.raises(HeadwayError, match="a trajectory without its teacher's logprobs"):
        objective.token_loss([untaught], proximal_logprobs=[policy_T])(0, policy_T.requires_grad_())


def test_a_teacher_teaches_the_same_in_both_places_while_nothing_is_clipped() -> None:
    """After an earlier update the objective clips the advantage, and leaves the loss alone."""
    whole, gradients = Whole(), {}
    for is_moved in (False, True):
        whole.proximal_T = whole.current_T + 0.5 * is_moved
        for place in ("advantage", "loss"):
            raw = {**PRESETS["tis"].algorithm, "distillation": {"coefficient": 0.7, "place": place}}
            _, gradients[place], _ = whole.train(Objective(algorithm(raw)), [[0, 1, 2], [3, 4, 5]])
        differs_T = (gradients["advantage"] - gradients["loss"]).abs() > 1e-6
        assert bool(differs_T.any()) == is_moved


@pytest.mark.parametrize(("raw", "message"), REFUSED)
def test_nonsense_is_refused_with_the_reason(raw: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Objective(algorithm(raw))


def test_group_advantages_come_in_order_with_statistics() -> None:
    groups = [_group("a", [1.0, 0.0, 0.0]), _group("b", [1.0, 1.0])]
    advantages, stats = judged(groups, "leave_one_out"), reward_stats(groups)
    assert advantages == pytest.approx([1.0, -0.5, -0.5, 0.0, 0.0])
    assert stats.mean == pytest.approx(0.6)
    assert stats.std == pytest.approx(np.std([1, 0, 0, 1, 1]))
    assert stats.flat_groups == 0.5
    assert stats.components == pytest.approx({"exact": 0.6})
    assert (stats.counts, stats.truncated) == ({"exact": 5}, None)


def test_a_measures_mean_is_over_the_samples_that_have_it() -> None:
    group = _group("a", [1.0, 0.0, 4.0])
    first, second, third = group.trajectories
    trajectories = (
        msgspec.structs.replace(first, rewards={"exact": 1.0, "exact/judge": 0.5}),
        msgspec.structs.replace(second, rewards={"exact": 0.0, "environment/turns": 2.0}, finish_reason="length"),
        msgspec.structs.replace(third, rewards={"exact": 4.0, "exact/judge": 1.0}, finish_reason="length"),
    )
    stats = reward_stats([msgspec.structs.replace(group, trajectories=trajectories)])
    assert stats.components == pytest.approx({"environment/turns": 2.0, "exact": 5 / 3, "exact/judge": 0.75})
    assert stats.counts == {"environment/turns": 1, "exact": 3, "exact/judge": 2}
    assert stats.truncated == 2.0


def test_names_beyond_a_bound_are_those_of_fewest_samples() -> None:
    group = _group("a", [1.0, 1.0])
    rewards = [{"exact": 1.0, **{f"{number}/{n}": 1.0 for n in range(400)}} for number in range(2)]
    trajectories = [msgspec.structs.replace(t, rewards=r) for t, r in zip(group.trajectories, rewards, strict=True)]
    stats = reward_stats([msgspec.structs.replace(group, trajectories=tuple(trajectories))])
    assert len(stats.components) == MOST_NAMES
    assert stats.counts["exact"] == 2


def test_own_advantages_by_import_path() -> None:
    assert judged([_group("a", [1.0, 2.0])], f"{__name__}:own_advantage") == [10, 20]


def test_no_groups_give_no_advantages() -> None:
    advantages, stats = judged([], "group_mean_std"), reward_stats([])
    assert (advantages, stats.mean, stats.std, stats.flat_groups) == ([], 0, 0, 0)


def test_a_reward_that_is_no_number_is_named() -> None:
    with pytest.raises(HeadwayError, match=r"trajectory a:0:1 has reward nan"):
        judged([_group("a", [1.0, float("nan")])], "group_mean")


def judged(groups: Sequence[Group], kind: str) -> list[float]:
    config = AlgorithmConfig(advantage=AdvantageConfig(kind=kind))
    return group_advantages(groups, shaped_rewards(groups, RewardShapingConfig(), 32), open_advantage(config))


def _group(name: str, rewards: list[float]) -> Group:
    prompt = Prompt(group=name, token_ids=[1], text="", ground_truth="", data_source="", num_samples=len(rewards))
    trajectories = tuple(
        Trajectory(
            tid=TrajectoryId(name, 0, sample),
            prompt_tokens=np.zeros(1, np.int32),
            response_tokens=np.zeros(1, np.int32),
            behavior_logprobs=np.zeros(1, np.float32),
            loss_mask=np.ones(1, np.uint8),
            spans=(),
            reward=reward,
            rewards={"exact": reward},
            finish_reason="stop",
            worker="",
        )
        for sample, reward in enumerate(rewards)
    )
    return Group(prompt=prompt, round=0, trajectories=trajectories)


@pytest.mark.parametrize(("former", "limit"), [(0, None), (3, 3)])
def test_the_age_weights_limit_is_still_read_by_its_former_name(
    former: int, limit: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    composition._hint_at_new_name.cache_clear()
    for _ in range(2):
        (correction,) = open_corrections(with_age_weight(max_lag=former))
        assert correction.function.keywords == {"rate": 0.1, "zero_above_lag": limit}
    assert caplog.text.count("max_lag of age_weight is called zero_above_lag now") == 1
    (today,) = open_corrections(with_age_weight(zero_above_lag=0))
    assert today.function.keywords["zero_above_lag"] == 0
    with pytest.raises(ConfigError, match="keep one"):
        open_corrections(with_age_weight(max_lag=1, zero_above_lag=1))


def with_age_weight(**options: int) -> AlgorithmConfig:
    correction = {"kind": "age_weight", "options": {"rate": 0.1, **options}}
    return msgspec.convert({"corrections": [correction]}, AlgorithmConfig)
