"""The settings of the loss, with defaults: each part of the composition, and the presets that set several."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headway.broker.errors import ConfigError
from headway.broker.user_code.kinds import did_you_mean

ADVANTAGES = (
    *("group_mean_std", "group_mean", "leave_one_out", "global_mean_std", "group_mean_global_std"),
    *("best_against_worst", "none", "gae"),
)
OBJECTIVES = (
    *("ppo_clip", "gspo", "gspo_token", "sequence_clip", "cispo", "topr", "aspo", "sapo", "dppo", "unclipped"),
    *("policy_gradient", "dpo", "ipo", "hinge", "robust_dpo", "length_desensitized_dpo", "simpo", "orpo"),
)
CORRECTIONS = (
    *("truncated_is", "sequence_truncated_is", "geometric_truncated_is", "self_normalized_is", "icepop", "decoupled"),
    *("token_mask", "geometric_sequence_mask", "kl_rejection", "veto", "opsm", "m2po", "age_weight"),
    "pair_truncated_is",
)
"""The names of the catalogue's parts, known here without torch, so that a slip is told before a process starts."""


class AdvantageConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The measure of how much better a response was than could be expected."""

    kind: Annotated[
        str,
        Meta(
            description="group_mean_std, group_mean, leave_one_out, global_mean_std, group_mean_global_std, "
            "best_against_worst (pairs), none (a teacher alone), gae (with a critic), or your own as "
            "package.module:function"
        ),
    ] = "group_mean_std"
    options: Annotated[dict[str, Any], Meta(description="keyword arguments of the advantage function")] = {}


class CreditConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rewards of an episode that each of its turns answers for."""

    kind: Annotated[
        Literal["episode", "turn"],
        Meta(
            description="episode: all tokens of a rollout share the advantage of its reward; turn: each turn has that"
            " of its return, which is its own reward, those of the turns that go on after it, and what the whole"
            " episode got at its end (advantage.kind is group_mean_std, group_mean or leave_one_out; or gae, to which"
            " rewards are given at the ends of turns)"
        ),
    ] = "episode"
    gamma: Annotated[
        float,
        Meta(gt=0, le=1, description="of kind=turn: the factor of a reward for each turn between; gae has its own"),
    ] = 1.0


class ObjectiveConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The surrogate that is maximized, and the policy that its ratio is anchored to."""

    kind: Annotated[
        str,
        Meta(
            description="ppo_clip, gspo, cispo, ..., or a loss of pairs: dpo, ipo, ... (`headway algorithms`); or your "
            "own as package.module:function"
        ),
    ] = "ppo_clip"
    anchor: Annotated[
        Literal["behavior", "proximal", "reference"],
        Meta(
            description="policy in the ratio's denominator: the one that sampled, the learner's before the step, or, "
            "for losses of pairs, the reference"
        ),
    ] = "behavior"
    options: Annotated[dict[str, Any], Meta(description="keyword arguments of the objective, such as clip_high")] = {}


class CorrectionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One weight or mask that corrects for lag; several apply in order."""

    kind: Annotated[
        str,
        Meta(description="truncated_is, icepop, ... (`headway algorithms`), or your own as package.module:function"),
    ]
    options: Annotated[dict[str, Any], Meta(description="keyword arguments of the correction, such as cap")] = {}


class AggregationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The way in which the losses of tokens become the loss of a batch."""

    kind: Annotated[
        Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_denominator", "pair_mean"],
        Meta(description="unit over which token losses are averaged (`headway algorithms`)"),
    ] = "token_mean"
    options: Annotated[dict[str, Any], Meta(description="keyword arguments of the aggregation")] = {}


class KlConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A penalty that holds the policy near a reference."""

    kind: Annotated[Literal["k1", "k2", "k3"], Meta(description="estimator of the divergence, by Schulman's names")] = (
        "k3"
    )
    coefficient: Annotated[
        float, Meta(ge=0, description="factor of the penalty; 0: no penalty and no reference model")
    ] = 0.0
    place: Annotated[
        Literal["loss", "reward"],
        Meta(description="the penalty is added to the loss, or taken from the reward before advantages"),
    ] = "loss"
    ema_decay: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="share of itself that the reference, also that of a loss of pairs, keeps in a step; the rest "
            "is the policy's. 1: no change",
        ),
    ] = 1.0


class RewardShapingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Changes to rewards before they are compared."""

    overlong_buffer: Annotated[
        int,
        Meta(
            ge=0,
            description="tokens before sampling.max_new_tokens over which DAPO's soft penalty rises; 0: no penalty",
        ),
    ] = 0
    length_normalized: Annotated[
        bool,
        Meta(
            description="rewards are divided by the response's length in units of sampling.max_new_tokens; of an"
            " episode all tokens count, those of tools, of every branch and of auxiliary calls among them"
        ),
    ] = False


class DistillationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The term by which the policy learns from a teacher (`teacher.path`) on its own samples."""

    coefficient: Annotated[
        float,
        Meta(ge=0, description="factor of the term; 0: no teacher is needed"),
    ] = 0.0
    place: Annotated[
        Literal["advantage", "loss"],
        Meta(
            description="the reverse KL of the policy that is trained is added to the loss, where nothing clips it; or"
            " log teacher - log anchor policy to each token's advantage, which the objective may clip"
        ),
    ] = "loss"
    top_k: Annotated[
        int,
        Meta(
            ge=0,
            le=1024,
            description="the teacher's likeliest tokens in each place, over which place=loss takes the divergence, "
            "eight bytes each in every sample; 0: only the sampled token counts",
        ),
    ] = 0
    divergence: Annotated[
        Literal["forward_kl", "reverse_kl", "jsd"],
        Meta(description="what the loss measures over the top_k tokens and the rest of the vocabulary"),
    ] = "reverse_kl"
    beta: Annotated[
        float, Meta(gt=0, lt=1, description="of divergence=jsd: near 0 it is like forward_kl, near 1 like reverse_kl")
    ] = 0.5

    @property
    def candidates(self) -> int:
        """The number of its likeliest tokens that the teacher names in each place."""
        return self.top_k if self.coefficient > 0 else 0


class CriticConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The value model of advantage.kind=gae."""

    path: Annotated[
        str,
        Meta(
            description="directory of the reward model, or stage:NAME, that the critic starts from; empty: the policy's"
            " first weights with a new head"
        ),
    ] = ""
    learning_rate: Annotated[float, Meta(gt=0, description="constant learning rate of the critic")] = 1e-5
    clip: Annotated[
        float,
        Meta(ge=0, description="distance from its old value, in units of the return, to which an update pulls a value"),
    ] = 0.2


class AlgorithmConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The loss as a composition; `preset` names a published one, whose values the other keys override."""

    preset: Annotated[
        str, Meta(description="name of a published composition: grpo, gspo, dapo, tis, ... (`headway algorithms`)")
    ] = "grpo"
    advantage: AdvantageConfig = AdvantageConfig()
    credit: CreditConfig = CreditConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    corrections: tuple[CorrectionConfig, ...] = ()
    proximal: Annotated[
        Literal["recompute", "log_linear", "linear"],
        Meta(description="source of proximal logprobs: a forward pass, or interpolation by lag (behavior to current)"),
    ] = "recompute"
    aggregation: AggregationConfig = AggregationConfig()
    kl: KlConfig = KlConfig()
    entropy_coefficient: Annotated[
        float,
        Meta(
            ge=0,
            description="factor of the bonus for the policy's entropy over the vocabulary at each trained token, in "
            "nats, which is taken from the loss; 0: no bonus, and no metric `entropy`",
        ),
    ] = 0.0
    reward: RewardShapingConfig = RewardShapingConfig()
    distillation: DistillationConfig = DistillationConfig()
    critic: CriticConfig = CriticConfig()
    router_replay: Annotated[
        bool,
        Meta(
            description="each token is trained with the experts that it had when it was sampled "
            "(mixture-of-experts models; vLLM reports experts on GPUs only)"
        ),
    ] = False
    mask_truncated: Annotated[
        bool,
        Meta(
            description="responses that ended at sampling.max_new_tokens or engine.max_model_len, and not by"
            " themselves, are not trained; their rewards still count in their group; a step without any other response"
            " still moves the weights by Adam's momentum and weight decay. Of an episode its finish_reason decides,"
            " which is that of its last trained turn; all rows of an agent's are left out together"
        ),
    ] = False
    dynamic_sampling: Annotated[
        int,
        Meta(
            ge=0,
            description="largest number of rounds a step in which groups whose samples all got the same reward are "
            "dropped and replaced, as in DAPO, and with mask_truncated groups whose samples were all truncated (a pair "
            "with one truncated response is neither trained nor replaced); 0: they are kept",
        ),
    ] = 0


def preset_defaults(name: str) -> dict[str, Any]:
    """Returns the keys that the preset sets, for deploy to merge beneath the user's own. Raises ConfigError."""
    from headway.algorithms.presets import PRESETS

    if name not in PRESETS:
        nearest = did_you_mean(name, PRESETS) or "."
        raise ConfigError(f"there is no preset {name!r}{nearest} Known: {', '.join(sorted(PRESETS))}.")
    return dict(PRESETS[name].algorithm)
