"""The comparison with TRL's GRPO, RLOO and GKD: its trainers' losses, called with the values that they would have."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from trl.experimental.gkd.gkd_trainer import GKDTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

from headway.algorithms.distillation import top_k_distillation
from headway.algorithms.presets import PRESETS

from .ours import Setting, Side, composed, differentiated
from .sample import Outcome, Sample

SEQUENCES = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
OPSM = ({"kind": "opsm", "options": {"delta": 0.01}},)


VOCABULARY = 11
DIVERGENCES: tuple[tuple[float, dict[str, Any]], ...] = (
    (0.0, {"divergence": "forward_kl"}),
    (1.0, {"divergence": "reverse_kl"}),
    (0.5, {"divergence": "jsd"}),
    (0.1, {"divergence": "jsd", "beta": 0.1}),
)
"""TRL's beta, and Headway's options."""


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
    for low, high in ((0.2, 0.2), (0.1, 0.05), (1.0, 1e9)):
        clip = {"clip_low": low, "clip_high": high}
        whole = composed("sequence_clip", clip, aggregation="sequence_sum")
        yield f"rloo {low} {high:g}", whole, rloo(epsilon_low=low, epsilon_high=high)
    yield "rloo, the preset's gradient with the policy that sampled", gradient(preset), gradient(rloo())
    for beta, options in DIVERGENCES:
        yield f"gkd {beta}", of_logits(partial(distilled, options)), of_logits(partial(whole_vocabulary, beta))


def grpo(**settings: Any) -> Side:
    """Return TRL's loss against the policy that sampled."""

    def side(sample: Sample) -> Outcome:
        inputs = _inputs(sample) | {
            "old_per_token_logps": sample.padded(sample.behavior_T),
            "ref_per_token_logps": sample.padded(sample.reference_T),
            "num_items_in_batch": sample.mask_T.sum(),
        }

        def loss(current_T: torch.Tensor) -> Any:
            current = sample.padded(current_T)
            return GRPOTrainer._compute_loss(_trainer(sample, current, **settings), None, inputs)

        return differentiated(sample, loss)

    return side


def gradient(side: Side) -> Side:
    """Return the gradient of a loss where the policy has not moved; losses of one gradient may differ in value."""

    def of_policy_that_sampled(sample: Sample) -> Outcome:
        found = side(replace(sample, current_T=sample.behavior_T)).gradient_T
        assert found is not None
        return Outcome(found)

    return of_policy_that_sampled


def preset(sample: Sample) -> Outcome:
    """Return the loss of algorithm.preset=rloo."""
    keys = PRESETS["rloo"].algorithm
    aggregation = keys["aggregation"]["kind"]
    return composed(keys["objective"]["kind"], corrections=keys["corrections"], aggregation=aggregation)(sample)


def rloo(*, epsilon_low: float = 0.2, epsilon_high: float = 0.2) -> Side:
    """Return the loss of TRL's RLOO against the policy that sampled: it clips the ratio of the whole response.

    The preset `rloo` has no clip, and the same gradient for the policy that sampled.
    """

    def side(sample: Sample) -> Outcome:
        inputs = _inputs(sample) | {"old_logps": sample.padded(sample.behavior_T * sample.mask_T).sum(1)}

        def loss(current_T: torch.Tensor) -> Any:
            trainer = _trainer(sample, sample.padded(current_T), epsilon_low=epsilon_low, epsilon_high=epsilon_high)
            return RLOOTrainer._compute_loss(trainer, None, inputs)

        return differentiated(sample, loss)

    return side


def of_logits(loss: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> Side:
    """Return a loss of student, teacher [T, V] and mask [T], and its gradient by the student's logits."""

    def side(sample: Sample) -> Outcome:
        generator = torch.Generator().manual_seed(1)
        shape = (2, sample.mask_T.numel(), VOCABULARY)
        student_TV, teacher_TV = 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
        value = loss(student_TV.requires_grad_(), teacher_TV, sample.mask_T)
        return Outcome(value.detach(), torch.autograd.grad(value, student_TV)[0])

    return side


def distilled(options: Any, student_TV: torch.Tensor, teacher_TV: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    """Return Headway's divergence from a teacher, the mean over trained tokens."""
    teacher_TK, ids_TK = teacher_TV.log_softmax(-1).topk(VOCABULARY)
    student_TK = student_TV.log_softmax(-1).gather(1, ids_TK)
    losses_T, _ = top_k_distillation(student_TK, teacher_TK, mask_T, **options)
    return losses_T.sum() / mask_T.sum()


def whole_vocabulary(beta: float, student_TV: torch.Tensor, teacher_TV: torch.Tensor, mask_T: torch.Tensor) -> Any:
    """Return GKD's divergence."""
    labels = torch.where(mask_T > 0, 0, -100)
    return GKDTrainer.generalized_jsd_loss(student_TV, teacher_TV, labels, beta=beta)


def _inputs(sample: Sample) -> dict[str, torch.Tensor]:
    mask = sample.padded(sample.mask_T)
    return {
        "prompt_ids": mask[:, :0].long(),
        "prompt_mask": mask[:, :0],
        "completion_ids": mask.long(),
        "completion_mask": mask,
        "advantages": sample.advantages_S,
    }


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
