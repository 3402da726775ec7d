"""The comparison with TRL on pairs and single judgements.

The losses of its trainers for DPO, KTO, ORPO, CPO and reward models are called with a model that returns the sample's
logprobs.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from trl.experimental.cpo.cpo_trainer import CPOTrainer
from trl.experimental.orpo.orpo_trainer import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.reward_trainer import RewardTrainer

from .ours import Setting, Side, centered_scores, differentiated, judged, logprobs, online, preferred, response_scores
from .sample import Outcome, Sample

MATCHED, MISMATCHED = 0, 1
"""Token ids by which the model tells KTO's two kinds of sequences apart."""
DPO_METRICS = {
    "reward_chosen": "rewards/chosen",
    "reward_rejected": "rewards/rejected",
    "reward_margin": "rewards/margins",
    "reward_accuracy": "rewards/accuracies",
    "logprob_chosen": "logps/chosen",
    "logprob_rejected": "logps/rejected",
}
KTO_METRICS = {
    "reward_desirable": "rewards/chosen",
    "reward_undesirable": "rewards/rejected",
    "logprob_desirable": "logps/chosen",
    "logprob_undesirable": "logps/rejected",
}
"""Headway's names, and TRL's."""
SINGLE_PRECISION = {"orpo 0.1", "orpo 0.7"}
"""Settings in which TRL itself rounds to float32."""


def settings() -> Iterator[Setting]:
    """Yield (name, Headway's side, TRL's side)."""
    for beta in (0.1, 0.7):
        options: dict[str, Any] = {"beta": beta}
        yield f"dpo {beta}", preferred("dpo", **options), dpo("sigmoid", **options)
        yield f"online dpo {beta}", online("dpo", **options), dpo("sigmoid", **options)
        yield f"online ipo {beta}", online("ipo", **options), dpo("ipo", **options)
        yield f"dpo ipo {beta}", preferred("ipo", **options), dpo("ipo", **options)
        yield f"dpo hinge {beta}", preferred("hinge", **options), dpo("hinge", **options)
        smoothed = {**options, "label_smoothing": 0.2}
        yield f"dpo robust {beta}", preferred("robust_dpo", **smoothed), dpo("robust", **smoothed)
        shorter = preferred("length_desensitized_dpo", alpha=0.3, **options)
        yield f"dpo ld_alpha {beta}", shorter, dpo("sigmoid", ld_alpha=0.3, **options)
        yield f"orpo {beta}", preferred("orpo", is_token_mean=True, **options), reference_free(ORPOTrainer, **options)
        yield f"simpo {beta}", preferred("simpo", gamma=0.5, **options), simpo(beta, gamma=0.5)
        yield f"kto {beta}", judged(**options), kto(**options)
        weights: dict[str, Any] = {"desirable_weight": 1.3, "undesirable_weight": 0.6}
        yield f"kto weighted {beta}", judged(**options, **weights), kto(**options, **weights)
    yield "dpo metrics", preferred("dpo", metrics=[*DPO_METRICS]), dpo("sigmoid", beta=0.1, metrics=DPO_METRICS)
    yield "kto metrics", judged(metrics=[*KTO_METRICS]), kto(beta=0.1, metrics=KTO_METRICS)
    for margin in (False, True):
        for coefficient in (0.0, 0.01):
            name = f"reward model, centering {coefficient}{', margins' if margin else ''}"
            yield name, centered_scores(coefficient, margin=margin), reward_model(coefficient, margin=margin)


def dpo(loss_type: str, *, metrics: dict[str, str] | None = None, **options: Any) -> Side:
    """Return the loss of the DPO trainer, or its metrics."""
    trainer: dict[str, Any] = {
        "ld_alpha": None,
        "label_smoothing": 0.0,
        "loss_types": [loss_type],
        "loss_weights": [1.0],
    }
    trainer |= {"f_divergence_type": "reverse_kl", "use_weighting": False, **options}

    def side(sample: Sample) -> Outcome:
        completion_mask = _after_a_prompt(by_kind(sample.padded(sample.mask_T)))
        inputs = {"completion_mask": completion_mask, "input_ids": completion_mask, "attention_mask": completion_mask}

        def loss(current_T: torch.Tensor) -> Any:
            model, reference = (Model(by_kind(_trained(sample, x_T))) for x_T in (current_T, sample.reference_T))
            trainer_ = _trainer(model, reference, **trainer)
            found = DPOTrainer._compute_loss(trainer_, model, inputs, False)
            return _reported(trainer_, metrics) if metrics else found

        return _outcome(sample, loss, metrics)

    return side


def kto(*, metrics: dict[str, str] | None = None, **options: Any) -> Side:
    """Return the loss of the KTO trainer, or its metrics.

    Its mismatched sequences have the proximal and the behavior logprobs.
    """
    trainer: dict[str, Any] = {
        "calculate_KL": True,
        "loss_type": "kto",
        "desirable_weight": 1.0,
        "undesirable_weight": 1.0,
        **options,
    }

    def side(sample: Sample) -> Outcome:
        mask = _after_a_prompt(sample.padded(sample.mask_T))
        ids = torch.full_like(mask, MATCHED)
        inputs = {"input_ids": ids, "attention_mask": mask, "completion_mask": mask, "label": sample.is_desirable}
        inputs |= {"KL_input_ids": ids + MISMATCHED, "KL_attention_mask": mask, "KL_completion_mask": mask}

        def loss(current_T: torch.Tensor) -> Any:
            model = Model(_trained(sample, current_T), _trained(sample, sample.proximal_T))
            reference = Model(_trained(sample, sample.reference_T), _trained(sample, sample.behavior_T))
            trainer_ = _trainer(model, reference, **trainer)
            trainer_._compute_kl_logps = lambda *call: KTOTrainer._compute_kl_logps(trainer_, *call)
            found = KTOTrainer._compute_loss(trainer_, model, inputs, False)
            return _reported(trainer_, metrics) if metrics else found

        return _outcome(sample, loss, metrics)

    return side


def simpo(beta: float, gamma: float) -> Side:
    """Return SimPO as the CPO trainer's loss type."""
    options = {"loss_type": "simpo", "simpo_gamma": gamma, "cpo_alpha": 0.0, "alpha": 0.0, "label_smoothing": 0.0}
    return reference_free(CPOTrainer, beta=beta, **options)


def reference_free(kind: Any, **options: Any) -> Side:
    """Return the loss of the ORPO or CPO trainer.

    Its supervised term counts the tokens with attention, which are the trained ones.
    """

    def side(sample: Sample) -> Outcome:
        mask = _after_a_prompt(sample.padded(sample.mask_T)).long()
        batch: dict[str, torch.Tensor] = {}
        for name, rows in (("chosen", mask[0::2]), ("rejected", mask[1::2])):
            batch |= {f"{name}_input_ids": 0 * rows, f"{name}_attention_mask": rows}
            batch[f"{name}_labels"] = torch.where(rows > 0, 0, -100)

        def loss(current_T: torch.Tensor) -> Any:
            model = Model(by_kind(_trained(sample, current_T)))
            methods = ("concatenated_inputs", "get_batch_logps")
            trainer = _trainer(model, None, **{name: getattr(kind, name) for name in methods}, **options)
            for name in ("concatenated_forward", "odds_ratio_loss", "cpo_loss"):
                if hasattr(kind, name):
                    setattr(trainer, name, getattr(kind, name).__get__(trainer))
            return kind.get_batch_loss_metrics(trainer, model, batch)[0]

        return differentiated(sample, lambda current_T: loss(logprobs(current_T)))

    return side


def reward_model(centering: float, *, margin: bool) -> Side:
    """Return the loss of the trainer of reward models."""

    def side(sample: Sample) -> Outcome:
        inputs = {"attention_mask": sample.padded(sample.mask_T)} | ({"margin": sample.margins} if margin else {})

        def loss(current_T: torch.Tensor) -> Any:
            scores = by_kind(response_scores(sample, current_T))
            trainer = _trainer(Model(scores), None)
            trainer.args.center_rewards_coefficient = centering or None
            model = lambda **_: SimpleNamespace(logits=scores[:, None])  # noqa: E731
            return RewardTrainer.compute_loss(trainer, model, dict(inputs))

        return differentiated(sample, loss)

    return side


class Model:
    """A model that returns the given logprobs [S, L] of matched and of mismatched sequences."""

    training = True
    is_gradient_checkpointing = False
    _modules: ClassVar[dict[str, Any]] = {}
    """What accelerate looks through once torch._dynamo is imported."""

    def __init__(self, matched: torch.Tensor, mismatched: torch.Tensor | None = None) -> None:
        self._matched = matched
        self._mismatched = mismatched

    def __call__(self, input_ids: torch.Tensor, **_: Any) -> Any:
        log_probs = self._matched
        if self._mismatched is not None and bool((input_ids == MISMATCHED).all()):
            log_probs = self._mismatched
        zeros = torch.zeros_like(log_probs)
        return SimpleNamespace(
            log_probs=log_probs,
            entropy=zeros,
            mean_logits=zeros,
            is_top1=zeros.bool(),
            logits=_logits_of_two(log_probs),
        )


def by_kind(values: torch.Tensor) -> torch.Tensor:
    """Return TRL's order of rows: all chosen ones, then all rejected ones."""
    return torch.cat([values[0::2], values[1::2]])


def _outcome(sample: Sample, loss: Callable[[torch.Tensor], Any], metrics: dict[str, str] | None) -> Outcome:
    if metrics:
        return Outcome(loss(logprobs(sample.current_T)))
    return differentiated(sample, lambda current_T: loss(logprobs(current_T)))


def _reported(trainer: Any, metrics: dict[str, str]) -> torch.Tensor:
    """Return the metrics of the loss that the trainer computed last."""
    return torch.tensor([trainer._metrics["train"][name][-1] for name in metrics.values()])


def _logits_of_two(log_probs: torch.Tensor) -> torch.Tensor:
    """Return logits [S, L + 1, 2]: token 0 has the logprob; row t predicts the token at t + 1."""
    certain = log_probs == 0  # masked places
    other = torch.log(-torch.expm1(torch.where(certain, -1.0, log_probs)))
    both = torch.stack([log_probs, torch.where(certain, -1.0, other)], dim=-1)
    return torch.nn.functional.pad(both, (0, 0, 0, 1))


def _after_a_prompt(mask: torch.Tensor) -> torch.Tensor:
    """Return values [S, L + 1] with a place before each response, which TRL cuts off."""
    return torch.nn.functional.pad(mask, (1, 0))


def _trained(sample: Sample, values_T: torch.Tensor) -> torch.Tensor:
    """Return logprobs [S, L], 0 where nothing is trained, as TRL's models return them."""
    return sample.padded(values_T * sample.mask_T)


def _trainer(model: Any, reference: Any, **settings: Any) -> Any:
    """Return the trainer's values that the losses read besides their inputs: one process."""
    trainer = {
        "model": model,
        "ref_model": reference,
        "accelerator": SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x),
        "args": SimpleNamespace(gradient_checkpointing_kwargs=None),
        "aux_loss_enabled": False,
        "precompute_ref_logps": False,
        "is_encoder_decoder": False,
        "padding_value": 0,
        "pad_token_id": 0,
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    return SimpleNamespace(**trainer | settings)
