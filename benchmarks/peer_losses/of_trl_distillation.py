"""The comparison with TRL on distillation: GKD's divergence over the whole vocabulary, and a sparse one.

The sparse one is over a teacher's likeliest tokens with a bucket for the rest, as TRL's trainer with a teacher behind a
server computes it.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from trl.experimental.gkd.gkd_trainer import GKDTrainer
from trl.experimental.server_distillation import server_distillation_trainer as by_server

from headway.algorithms.distillation import top_k_distillation

from .of_verl import Setting
from .ours import Side
from .sample import Outcome, Sample

VOCABULARY = 11
DIVERGENCES: tuple[tuple[float, dict[str, Any]], ...] = (
    (0.0, {"divergence": "forward_kl"}),
    (1.0, {"divergence": "reverse_kl"}),
    (0.5, {"divergence": "jsd"}),
    (0.1, {"divergence": "jsd", "beta": 0.1}),
)
"""TRL's beta, and Headway's options."""

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Computes a loss of the student's logits [T, V], the teacher's logits [T, V] and the mask [T]."""


def settings() -> Iterator[Setting]:
    """Yield (name, Headway's side, TRL's side)."""
    for beta, options in DIVERGENCES:
        yield f"gkd {beta}", distilled(VOCABULARY, **options), of_logits(whole_vocabulary(beta))
        for k in (1, 4):
            yield f"distillation of {k} tokens, beta {beta}", distilled(k, **options), of_logits(sparse(k, beta))
    yield "server distillation of 4 tokens", distilled(4), of_logits(forward_kl_by_server)


def of_logits(loss: Loss) -> Side:
    """Return a loss, and its gradient by the student's logits."""

    def side(sample: Sample) -> Outcome:
        generator = torch.Generator().manual_seed(1)
        shape = (2, sample.mask_T.numel(), VOCABULARY)
        student_TV, teacher_TV = 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
        value = loss(student_TV.requires_grad_(), teacher_TV, sample.mask_T)
        return Outcome(value.detach(), torch.autograd.grad(value, student_TV)[0])

    return side


def distilled(k: int, **options: Any) -> Side:
    """Return Headway's mean over trained tokens."""

    def loss(student_TV: torch.Tensor, teacher_TV: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
        teacher_TK, ids_TK = teacher_TV.log_softmax(-1).topk(k)
        student_TK = student_TV.log_softmax(-1).gather(1, ids_TK)
        losses_T, _ = top_k_distillation(student_TK, teacher_TK, mask_T, **options)
        return losses_T.sum() / mask_T.sum()

    return of_logits(loss)


def whole_vocabulary(beta: float) -> Loss:
    """Return GKD's divergence."""

    def loss(student_TV: torch.Tensor, teacher_TV: torch.Tensor, mask_T: torch.Tensor) -> Any:
        labels = torch.where(mask_T > 0, 0, -100)
        return GKDTrainer.generalized_jsd_loss(student_TV, teacher_TV, labels, beta=beta)

    return loss


def sparse(k: int, beta: float) -> Loss:
    """Return TRL's divergence over k tokens and its bucket for the rest."""

    def loss(student_TV: torch.Tensor, teacher_TV: torch.Tensor, mask_T: torch.Tensor) -> Any:
        teacher_TK, ids_TK = teacher_TV.log_softmax(-1).topk(k)
        valid = torch.ones_like(ids_TK, dtype=torch.bool)
        student, support = by_server._add_tail_bucket(student_TV.log_softmax(-1).gather(1, ids_TK), valid)
        teacher, _ = by_server._add_tail_bucket(teacher_TK, valid)
        found = by_server._jsd_divergence(student, teacher, beta=beta, support_mask=support)
        return (found.sum(-1) * mask_T).sum() / mask_T.sum()

    return loss


def forward_kl_by_server(student_TV: torch.Tensor, teacher_TV: torch.Tensor, mask_T: torch.Tensor) -> Any:
    """Return the whole loss of TRL's trainer."""
    kind = by_server.ServerDistillationTrainer
    trainer = SimpleNamespace(loss_add_tail=True, _reduce_divergence_loss=kind._reduce_divergence_loss)
    teacher_TK, ids_TK = teacher_TV.log_softmax(-1).topk(4)
    listed = {"topk_logprobs": teacher_TK[None], "topk_token_ids": ids_TK[None]}
    labels = torch.where(mask_T > 0, 0, -100)[None]
    return kind._compute_server_forward_kl_loss(trainer, listed, student_TV.log_softmax(-1)[None], labels)
