"""Names people know -> compositions, as plain data with published defaults. Imports no torch.

A preset holds the keys of the learner's AlgorithmConfig that it sets; a recipe's own keys override them.
Where a paper says nothing of asynchronous sampling, its pi_old is the policy that sampled: anchor `behavior`.
"""

from typing import Any

Preset = dict[str, Any]

PRESETS: dict[str, Preset] = {
    # Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, with token mean (DAPO, arXiv:2503.14476) as most
    # systems run it, and without the KL term, which needs a second model: add kl.coefficient (the paper's is
    # 0.04) for it.
    "grpo": {
        "advantage": "group_mean_std",
        "objective": {"kind": "ppo_clip", "anchor": "behavior", "clip_low": 0.2, "clip_high": 0.2},
        "corrections": [],
        "aggregation": "token_mean",
        "kl": {"kind": "k3", "coefficient": 0.0},
    },
    # Zheng et al. 2025, arXiv:2507.18071, equation 5 and the bounds of section 5.1.
    "gspo": {
        "advantage": "group_mean_std",
        "objective": {"kind": "gspo", "anchor": "behavior", "clip_low": 3e-4, "clip_high": 4e-4},
        "corrections": [],
        "aggregation": "sequence_mean",
        "kl": {"kind": "k3", "coefficient": 0.0},
    },
    # Hilton et al. 2022, arXiv:2110.00641; for language models AReaL, Fu et al. 2025, arXiv:2505.24298,
    # equation 5.
    "decoupled_ppo": {
        "advantage": "group_mean_std",
        "objective": {"kind": "ppo_clip", "anchor": "proximal", "clip_low": 0.2, "clip_high": 0.2},
        "corrections": [{"kind": "decoupled"}],
        "aggregation": "token_mean",
        "kl": {"kind": "k3", "coefficient": 0.0},
    },
    # Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training", cap 2.
    "tis": {
        "advantage": "group_mean_std",
        "objective": {"kind": "ppo_clip", "anchor": "proximal", "clip_low": 0.2, "clip_high": 0.2},
        "corrections": [{"kind": "truncated_is", "cap": 2.0}],
        "aggregation": "token_mean",
        "kl": {"kind": "k3", "coefficient": 0.0},
    },
}
