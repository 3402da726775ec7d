"""The comparison with TRL's RLOO: the trainer's advantages and its loss, called with the values that it would have.

TRL clips the ratio of the whole response. The preset `rloo` has no clip, and the same gradient for the policy that
sampled.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import PartialState
from trl.trainer import rloo_trainer
from trl.trainer.rloo_trainer import RLOOTrainer

from headway.algorithms.advantages import leave_one_out
from headway.algorithms.presets import PRESETS
from headway.algorithms.ratios import KL_ESTIMATORS
from headway.algorithms.returns import kl_shaped

from .of_verl import Setting
from .ours import Side, composed, differentiated
from .sample import LENGTHS, Outcome, Sample

GROUP_SIZE = 4
"""TRL's groups are equally large."""


def settings() -> Iterator[Setting]:
    """Yield (name, Headway's side, TRL's side)."""
    for low, high in ((0.2, 0.2), (0.1, 0.05), (1.0, 1e9)):
        clip = {"clip_low": low, "clip_high": high}
        ours = composed("sequence_clip", clip, aggregation="sequence_sum")
        yield f"rloo {low} {high:g}", ours, by_trainer(epsilon_low=low, epsilon_high=high)
    yield "rloo, the preset's gradient with the policy that sampled", gradient(preset), gradient(by_trainer())
    for beta in (0.0, 0.1):
        yield f"advantages of rloo, KL in the reward {beta}", advantages(beta), scored(beta)


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


def by_trainer(*, epsilon_low: float = 0.2, epsilon_high: float = 0.2) -> Side:
    """Return the trainer's loss against the policy that sampled."""

    def side(sample: Sample) -> Outcome:
        mask = sample.padded(sample.mask_T)
        inputs = {
            "prompt_ids": mask[:, :0].long(),
            "prompt_mask": mask[:, :0],
            "completion_ids": mask.long(),
            "completion_mask": mask,
            "advantages": sample.advantages_S,
            "old_logps": sample.padded(sample.behavior_T * sample.mask_T).sum(1),
        }

        def loss(current_T: torch.Tensor) -> Any:
            current = sample.padded(current_T)
            trainer = _trainer(current, epsilon_low=epsilon_low, epsilon_high=epsilon_high)
            return RLOOTrainer._compute_loss(trainer, None, inputs)

        return differentiated(sample, loss)

    return side


def advantages(beta: float) -> Side:
    """Return Headway's advantages, with a KL penalty in the reward."""

    def side(sample: Sample) -> Outcome:
        everywhere_T = torch.ones_like(sample.mask_T)
        penalty_T = KL_ESTIMATORS["k1"](sample.behavior_T, sample.reference_T, everywhere_T)
        rewards_S = kl_shaped(sample.rewards_S, penalty_T, everywhere_T, sample.cu_seqlens, coefficient=beta)
        return Outcome(leave_one_out(rewards_S, torch.arange(len(LENGTHS)) // GROUP_SIZE)[0])

    return side


def scored(beta: float) -> Side:
    """Return the trainer's advantages of the same responses, all of whose tokens it trains."""

    def side(sample: Sample) -> Outcome:
        PartialState(cpu=True)
        policy, reference = SimpleNamespace(training=True), SimpleNamespace()
        logprobs = {id(policy): sample.padded(sample.behavior_T), id(reference): sample.padded(sample.reference_T)}
        trainer = _trainer(
            sample.padded(sample.current_T),
            model=policy,
            ref_model=reference,
            beta=beta,
            _generate=lambda prompts: ([[1]] * len(prompts), [[1] * length for length in LENGTHS], prompts),
            _get_per_token_logps_and_entropies=lambda model, *_, **__: (logprobs[id(model)], None, None),
            _calculate_rewards=lambda *_: sample.rewards_S[:, None],
        )
        # Gradient checkpointing, which TRL switches off meanwhile, is of a model with weights.
        original, rloo_trainer.disable_gradient_checkpointing = (
            rloo_trainer.disable_gradient_checkpointing,
            lambda *_: nullcontext(),
        )
        try:
            outputs = RLOOTrainer._generate_and_score_completions(trainer, [{"prompt": "1+1="}] * len(LENGTHS))
        finally:
            rloo_trainer.disable_gradient_checkpointing = original
        return Outcome(outputs["advantages"])

    return side


def _trainer(current: torch.Tensor, **settings: Any) -> Any:
    """Return the trainer's values that advantages and loss read, with TRL's defaults: one process."""
    arguments = {"per_device_train_batch_size": len(LENGTHS), "gradient_checkpointing_kwargs": None}
    logs: defaultdict[str, Any] = defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list))
    trainer = {
        "model": SimpleNamespace(training=True),
        "accelerator": SimpleNamespace(
            device="cpu", process_index=0, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        "args": SimpleNamespace(**arguments),
        "aux_loss_enabled": False,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "num_generations": GROUP_SIZE,
        "reward_weights": torch.ones(1),
        "reward_func_names": ["task"],
        "reward_clip_range": None,
        "normalize_advantages": False,
        "mask_truncated_completions": False,
        "pad_to_multiple_of": None,
        "_tokenizer": SimpleNamespace(pad_token_id=0),
        "_metrics": {"train": defaultdict(list)},
        "_logs": logs,
        "_pending_extra_logs": {},
        "_pending_metrics": {},
        "_get_per_token_logps_and_entropies": lambda *_, **__: (current, torch.zeros_like(current), None),
    }
    return SimpleNamespace(**trainer | settings)
