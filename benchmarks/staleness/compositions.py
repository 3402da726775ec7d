"""The compared losses: names -> the keys of `algorithm` in a recipe. Options left out are the published ones.

A name is `family/correction`. Every correction is put on GRPO and on GSPO; published objectives of another kind stand
beside GRPO's, and losses of pairs are a family of their own. One update a batch: the proximal policy is the current
one, so a clip that is anchored to it never binds.
"""

from typing import Any

from headway.algorithms.presets import PRESETS

Keys = dict[str, Any]

ON_POLICY = "none"
"""No correction: at lag 0 all others of a family are compared with it."""

FAMILIES: dict[str, Keys] = {
    "grpo": {
        "advantage": {"kind": "group_mean_std"},
        "objective": {"kind": "ppo_clip", "anchor": "proximal"},
        "aggregation": {"kind": "token_mean"},
    },
    "gspo": {
        "advantage": {"kind": "group_mean_std"},
        "objective": {"kind": "gspo", "anchor": "proximal"},
        "aggregation": {"kind": "sequence_mean"},
    },
}
"""Families that are anchored to the proximal policy, so that only a correction depends on lag."""

K3 = {"kind": "kl_rejection", "options": {"kind": "k3"}}
TIS = {"kind": "truncated_is"}

CORRECTIONS: dict[str, Keys] = {
    ON_POLICY: {},
    "tis": {"corrections": [TIS]},
    "decoupled": {"corrections": [{"kind": "decoupled"}]},
    "sequence_tis": {"corrections": [{"kind": "sequence_truncated_is"}]},
    "geometric_tis": {"corrections": [{"kind": "geometric_truncated_is"}]},
    "self_normalized": {"corrections": [{"kind": "self_normalized_is"}]},
    "icepop": {"corrections": [{"kind": "icepop"}]},
    "geometric_sequence_mask": {"corrections": [TIS, {"kind": "geometric_sequence_mask"}]},
    "k3_rejection": {"corrections": [TIS, K3]},
    "veto": {"corrections": [TIS, {"kind": "veto"}]},
    "m2po": {"corrections": [{"kind": "decoupled"}, {"kind": "m2po"}]},
    "log_linear": {"corrections": [{"kind": "decoupled"}], "proximal": "log_linear"},
    "linear": {"corrections": [{"kind": "decoupled"}], "proximal": "linear"},
    # At a lag that never changes, this is a factor of the whole loss, which Adam takes out again.
    "age_weight": {"corrections": [{"kind": "age_weight"}]},
}
"""Keys that go over a family's. Masks come with the weight with which they are published."""

OBJECTIVES: dict[str, Keys] = {
    "grpo/behavior_clip": {"objective": {"kind": "ppo_clip", "anchor": "behavior"}},
    "gspo/behavior_clip": {"objective": {"kind": "gspo", "anchor": "behavior"}},
    "gspo/behavior_clip_wide": {
        "objective": {"kind": "gspo", "anchor": "behavior", "options": {"clip_low": 0.1, "clip_high": 0.1}}
    },
    "grpo/opsm": {"objective": {"kind": "ppo_clip", "anchor": "behavior"}, "corrections": [{"kind": "opsm"}]},
    "gspo/opsm": {"objective": {"kind": "gspo", "anchor": "behavior"}, "corrections": [{"kind": "opsm"}]},
    # The published bounds are for an engine that rounds otherwise, or a lag of one or two.
    "grpo/geometric_sequence_mask_wide": {
        "corrections": [TIS, {"kind": "geometric_sequence_mask", "options": {"low": 0.9, "high": 1.1}}]
    },
    "grpo/k3_rejection_wide": {
        "corrections": [TIS, {"kind": "kl_rejection", "options": {"kind": "k3", "threshold": 0.1}}]
    },
    "grpo/opsm_wide": {
        "objective": {"kind": "ppo_clip", "anchor": "behavior"},
        "corrections": [{"kind": "opsm", "options": {"delta": 0.1}}],
    },
    "grpo/policy_gradient_tis": {"objective": {"kind": "policy_gradient", "anchor": "behavior"}, "corrections": [TIS]},
    **{
        f"grpo/{name}": PRESETS[name].algorithm
        for name in ("cispo", "topr", "topr_sequence_mean", "dppo", "sapo", "aspo")
    },
}
"""Keys that go over those of the family that the name begins with."""

PAIRS: dict[str, Keys] = {
    "pairs/none": PRESETS["online_dpo"].algorithm,
    "pairs/truncated_is": {**PRESETS["online_dpo"].algorithm, "corrections": [{"kind": "pair_truncated_is"}]},
}
"""Online DPO, which trains two responses of a group."""

COMPOSITIONS: dict[str, Keys] = (
    {
        f"{family}/{name}": keys | correction
        for family, keys in FAMILIES.items()
        for name, correction in CORRECTIONS.items()
    }
    | {name: FAMILIES[name.partition("/")[0]] | keys for name, keys in OBJECTIVES.items()}
    | PAIRS
)
