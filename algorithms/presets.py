"""Published names -> compositions, as plain data with published defaults. Imports no torch.

A preset holds the keys of the learner's AlgorithmConfig that it sets; a recipe's own keys override them. Options that
are left out have the defaults of their functions, which are the published ones.
Where a paper says nothing of asynchronous sampling, its pi_old is the policy that sampled: anchor `behavior`.
"""

from typing import Any, NamedTuple


class Preset(NamedTuple):
    """A published composition."""

    source: str
    algorithm: dict[str, Any]
    note: str = ""
    """The differences from the source, with reasons."""


def _of(
    advantage: str,
    objective: str,
    *,
    anchor: str = "behavior",
    options: dict[str, Any] | None = None,
    corrections: tuple[str, ...] = (),
    aggregation: str = "token_mean",
    **others: Any,
) -> dict[str, Any]:
    return {
        "advantage": {"kind": advantage, "options": {}},
        "objective": {"kind": objective, "anchor": anchor, "options": options or {}},
        "corrections": [{"kind": correction, "options": {}} for correction in corrections],
        "aggregation": {"kind": aggregation, "options": {}},
        **others,
    }


def _of_pairs(loss: str) -> dict[str, Any]:
    return _of("best_against_worst", loss, anchor="reference", aggregation="pair_mean")


_NO_KL = "Without the KL term, which needs a second model: set kl.coefficient for it"

PRESETS: dict[str, Preset] = {
    "grpo": Preset(
        "GRPO, Shao et al. 2024 (DeepSeekMath, arXiv:2402.03300)",
        _of("group_mean_std", "ppo_clip"),
        f"{_NO_KL} (the paper's is 0.04); the mean over tokens (DAPO's), as most systems run it.",
    ),
    "dr_grpo": Preset(
        "Dr. GRPO, Liu et al. 2025 (arXiv:2503.20783), section 3.2",
        _of("group_mean", "ppo_clip", aggregation="fixed_denominator"),
        "The fixed length of the denominator is sampling.max_new_tokens.",
    ),
    "dapo": Preset(
        "DAPO, Yu et al. 2025 (arXiv:2503.14476)",
        _of("group_mean_std", "ppo_clip", options={"clip_high": 0.28}, dynamic_sampling=8),
        "Its soft penalty on overlong responses depends on their length: set reward.overlong_buffer (the paper's is "
        "4096 of 20480 tokens). Its overlong filtering is mask_truncated.",
    ),
    "gspo": Preset(
        "GSPO, Zheng et al. 2025 (arXiv:2507.18071), equation 5 and the bounds of section 5.1",
        _of("group_mean_std", "gspo", aggregation="sequence_mean"),
    ),
    "gspo_token": Preset(
        "GSPO-token, Zheng et al. 2025 (arXiv:2507.18071), section 4.3",
        _of("group_mean_std", "gspo_token", aggregation="sequence_mean"),
        "Differs from gspo only where the tokens of a response have different advantages.",
    ),
    "cispo": Preset(
        "CISPO, MiniMax 2025 (MiniMax-M1, arXiv:2506.13585)",
        _of("group_mean_std", "cispo"),
    ),
    "rloo": Preset(
        "RLOO, Ahmadian et al. 2024 (arXiv:2402.14740)",
        _of("leave_one_out", "policy_gradient", corrections=("truncated_is",), aggregation="sequence_sum"),
        "The paper is on-policy; here truncated importance weights correct for lag.",
    ),
    "rloo_sequence_mean": Preset(
        "RLOO, Ahmadian et al. 2024 (arXiv:2402.14740)",
        _of("leave_one_out", "policy_gradient", corrections=("truncated_is",), aggregation="sequence_mean"),
        "rloo with the mean over a response's tokens where the paper has their sum: long responses do not count more.",
    ),
    "reinforce_plus_plus": Preset(
        "REINFORCE++, Hu et al. 2025 (arXiv:2501.03262)",
        _of("global_mean_std", "ppo_clip"),
        "Without its KL penalty, which needs a second model: set kl.coefficient, kl.place=reward and kl.kind=k1.",
    ),
    "reinforce_plus_plus_baseline": Preset(
        "REINFORCE++ with a group baseline, Hu et al. 2025 (arXiv:2501.03262)",
        _of("group_mean_global_std", "ppo_clip"),
        f"{_NO_KL}.",
    ),
    "ppo": Preset(
        "PPO, Schulman et al. 2017 (arXiv:1707.06347), with generalized advantages (arXiv:1506.02438)",
        _of("gae", "ppo_clip"),
        "With a critic of the policy's size, and without a KL penalty.",
    ),
    "topr": Preset(
        "TOPR, Le Roux et al. 2025 (arXiv:2503.14286)",
        _of("group_mean", "topr", aggregation="sequence_sum"),
        "The paper's baseline is that of the reward; here the group's mean.",
    ),
    "topr_sequence_mean": Preset(
        "TOPR, Le Roux et al. 2025 (arXiv:2503.14286)",
        _of("group_mean", "topr", aggregation="sequence_mean"),
        "topr with the mean over a response's tokens where the paper has their sum: long responses do not count more.",
    ),
    "aspo": Preset("ASPO, Wang et al. 2025 (arXiv:2510.06062)", _of("group_mean_std", "aspo")),
    "sapo": Preset(
        "SAPO, Gao et al. 2025 (arXiv:2511.20347)", _of("group_mean_std", "sapo", aggregation="sequence_mean")
    ),
    "dppo": Preset("DPPO, Qi et al. 2026 (arXiv:2602.04879)", _of("group_mean_std", "dppo")),
    "decoupled_ppo": Preset(
        "Decoupled PPO, Hilton et al. 2022 (arXiv:2110.00641); for language models AReaL, Fu et al. 2025 "
        "(arXiv:2505.24298), equation 5",
        _of("group_mean_std", "ppo_clip", anchor="proximal", corrections=("decoupled",)),
    ),
    "a_3po": Preset(
        "A-3PO: decoupled PPO whose proximal policy is interpolated by age (arXiv:2512.06547)",
        _of("group_mean_std", "ppo_clip", anchor="proximal", corrections=("decoupled",), proximal="log_linear"),
        "Saves the forward pass for the proximal policy.",
    ),
    "tis": Preset(
        'TIS, Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"',
        _of("group_mean_std", "ppo_clip", anchor="proximal", corrections=("truncated_is",)),
    ),
    "sequence_tis": Preset(
        "Truncated importance weights of whole sequences (the product), as in verl, SkyRL and TRL",
        _of("group_mean_std", "ppo_clip", anchor="proximal", corrections=("sequence_truncated_is",)),
        "The better the shorter the responses: the spread of the product grows with length.",
    ),
    "icepop": Preset(
        "IcePop, Ling team 2025 (Ring-1T, arXiv:2510.18855)",
        _of("group_mean_std", "ppo_clip", anchor="proximal", corrections=("icepop",)),
    ),
    "distillation": Preset(
        'On-policy distillation, Thinking Machines 2025, "On-Policy Distillation"; Agarwal et al. 2023 (GKD, '
        "arXiv:2306.13649)",
        _of("none", "ppo_clip", distillation={"coefficient": 1.0}),
        "Needs a teacher: set teacher.path. The divergence is that of the policy that is trained, however old the "
        "sample, with the whole importance weight of each token. advantage.kind adds the task's rewards.",
    ),
    "m2po": Preset(
        'M2PO, Zheng et al. 2025, "Prosperity before collapse" (arXiv:2510.01161)',
        _of("group_mean_std", "unclipped", corrections=("m2po",)),
        "Takes a forward pass before each update, which the mask of the whole batch needs.",
    ),
    "online_dpo": Preset(
        "Online DPO, Guo et al. 2024 (OAIF, arXiv:2402.04792); asynchronously Noukhovitch et al. 2024 "
        "(arXiv:2410.18252)",
        _of_pairs("dpo"),
        "The pair is the best and the worst response of a group by reward; the others, and groups whose rewards are "
        "all equal, are not trained. Lag is not corrected, as in the second paper; the correction pair_truncated_is "
        "weighs each pair. The reference is the first policy, or with kl.ema_decay a moving average of the policy.",
    ),
    "online_ipo": Preset(
        "Online IPO, Calandriello et al. 2024 (arXiv:2403.08635)",
        _of_pairs("ipo"),
        "online_dpo with the loss of IPO: its margin has a target. A response counts by the mean over its tokens.",
    ),
}
