"""The comparison with TRL's GRPO: its trainer's loss, called with the values that the trainer would have."""

from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from trl.trainer.grpo_trainer import GRPOTrainer

from .of_verl import Setting
from .ours import Side, composed, differentiated
from .sample import Outcome, Sample

SEQUENCES = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
OPSM = ({"kind": "opsm", "options": {"delta": 0.01}},)


def settings() -> Iterator[Setting]:
    """Yield (name, Headway's side, TRL's side)."""
    for loss_type, aggregation in (
        ("grpo", "sequence_mean"),
        ("bnpo", "token_mean"),
        ("dapo", "token_mean"),
        ("dr_grpo", "fixed_denominator"),
        ("luspo", "sequence_sum"),
    ):
        yield loss_type, composed("ppo_clip", {}, aggregation=aggregation), grpo(loss_type=loss_type)
    yield "grpo 0.2 0.28", composed("ppo_clip", {"clip_high": 0.28}), grpo(loss_type="bnpo", epsilon_high=0.28)
    yield "delta 1.3", composed("ppo_clip", {"dual_clip": 1.3}), grpo(loss_type="bnpo", delta=1.3)
    yield "cispo", composed("cispo", {"clip_high": 4.0}), grpo(loss_type="cispo", epsilon_high=5.0)
    yield "sapo", composed("sapo", aggregation="sequence_mean"), grpo(loss_type="sapo")
    wide = {"clip_low": 0.1, "clip_high": 0.05}
    sequences = grpo(**SEQUENCES, epsilon_low=0.1, epsilon_high=0.05)
    yield "sequence ratios", composed("gspo", wide, aggregation="sequence_mean"), sequences
    yield "k3 in the loss", composed("ppo_clip", kl=0.1), grpo(loss_type="bnpo", beta=0.1)
    masked = grpo(loss_type="bnpo", off_policy_mask_threshold=0.01)
    yield "off-policy sequence mask", composed("ppo_clip", corrections=OPSM), masked


def grpo(**settings: Any) -> Side:
    """Return TRL's loss against the policy that sampled."""

    def side(sample: Sample) -> Outcome:
        mask = sample.padded(sample.mask_T)
        inputs = {
            "prompt_ids": mask[:, :0].long(),
            "prompt_mask": mask[:, :0],
            "completion_ids": mask.long(),
            "completion_mask": mask,
            "advantages": sample.advantages_S,
            "old_per_token_logps": sample.padded(sample.behavior_T),
            "ref_per_token_logps": sample.padded(sample.reference_T),
            "num_items_in_batch": mask.sum(),
        }

        def loss(current_T: torch.Tensor) -> Any:
            current = sample.padded(current_T)
            return GRPOTrainer._compute_loss(_trainer(sample, current, **settings), None, inputs)

        return differentiated(sample, loss)

    return side


def _trainer(sample: Sample, current: torch.Tensor, **settings: Any) -> Any:
    """Return the trainer's values that the loss reads, with TRL's defaults: one process, one micro-batch a step."""
    arguments = {"delta": settings.pop("delta", None), "use_bias_correction_kl": False, "steps_per_generation": 1}
    trainer = {
        "model": SimpleNamespace(training=True),
        "accelerator": SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        "args": SimpleNamespace(**arguments, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05),
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "use_vllm": False,
        "max_completion_length": sample.longest,
        "current_gradient_accumulation_steps": 1,
        "_entropy_bonus_enabled": False,
        "_metrics": {"train": defaultdict(list)},
        "_get_per_token_logps_and_entropies": lambda *_, **__: (current, torch.zeros_like(current), None),
        "get_off_policy_mask": GRPOTrainer.get_off_policy_mask,
    }
    return SimpleNamespace(**trainer | settings)
