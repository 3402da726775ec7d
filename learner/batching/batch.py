"""The packed batch: sequences laid end to end in one row, never padded.

The sequences of a rollout lie one after another. It has one, or, of an agent that branches, several
(`broker.wire.rows`): the model computes each by itself, and the loss takes all of them together for one sequence.

T packed tokens, S sequences, U rollouts, L layers with experts, K experts of a token, C candidates in its place. Every
[T] field speaks of the token at its own place: `behavior_logprobs_T[t]` is the logprob of token t given its sequence
before t. The first token of a sequence has none and is never trained.
"""

from dataclasses import dataclass, replace

import torch

from headway.algorithms.tokens import Tokens

from .tree import PrefixTree

WORTH_PICKING = 0.9
"""The largest share of positions that are picked for the output head; of more, all go through it."""


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """One micro-batch, the input of a backend. An empty one (S = 0) lets a rank join the collectives of others."""

    token_ids_T: torch.Tensor
    """[T] int64"""
    position_ids_T: torch.Tensor
    """[T] int64, restarting at 0 with every sequence."""
    cu_seqlens: torch.Tensor
    """[S + 1] int32, where each sequence begins; the last entry is T."""
    cu_rollouts: torch.Tensor | None = None
    """[U + 1] int32, where each rollout begins; None: each has one sequence."""
    loss_mask_T: torch.Tensor
    """[T] float32, 1 where the token is trained."""
    behavior_logprobs_T: torch.Tensor
    """[T] float32 logprobs under the policy that sampled the token; 0 where the mask is 0."""
    advantages_T: torch.Tensor
    """[T] float32; 0 where the mask is 0."""
    lags_T: torch.Tensor
    """[T] int64, the step trained now minus the step that sampled the token; 0 where the mask is 0."""
    experts_TLK: torch.Tensor | None = None
    """[T, L, K] int16, for router replay: the experts that compute each token. -1 at the last token of a sequence,
    which the engine never computed: there the router chooses for itself. None: it chooses for all tokens."""
    teacher_logprobs_T: torch.Tensor | None = None
    """[T] float32 logprobs that a teacher gives the tokens; 0 where the mask is 0. None: a sequence has none."""
    candidates_TC: torch.Tensor | None = None
    """[T, C] int64 tokens that a teacher found likeliest in the place of each token. A policy gives such a batch's
    logprobs as [T, 2 + C]: of the token, of the policy's own likeliest token (without gradient), of the candidates.
    None: it gives those of the tokens, [T]."""
    wants_confidence: bool = False
    """Whether a policy gives this batch's logprobs as [T, 3]: of the token, of the policy's own likeliest token
    (without gradient), and the entropy of its distribution in nats. Such a batch has no candidates."""
    only_trained: bool = False
    """Whether logprobs of trained tokens alone are read: a policy may give 0 for all others, and save its output head.
    """
    teacher_logprobs_TC: torch.Tensor | None = None
    """[T, C] float32, the teacher's logprobs of these candidates, falling along a row; -inf fills a place without a
    token. No row of a trained token is without one."""
    tree: PrefixTree | None = None
    """The plan that computes shared tokens once. None: each sequence is computed by itself. Results are the same
    but for rounding, so a backend may ignore it."""

    @property
    def plain(self) -> "PackedBatch":
        """The same batch, whose logprobs a policy gives as [T]."""
        return replace(self, candidates_TC=None, teacher_logprobs_TC=None, wants_confidence=False)

    @property
    def tokens(self) -> Tokens:
        """The tensors that functions of `algorithms` take. Their sequences are rollouts."""
        return Tokens(self.behavior_logprobs_T, self.advantages_T, self.loss_mask_T, self.lags_T, self.rollouts)

    @property
    def rollouts(self) -> torch.Tensor:
        """[U + 1] where each rollout begins: the bounds of all that a loss says of sequences."""
        return self.cu_seqlens if self.cu_rollouts is None else self.cu_rollouts

    @property
    def picked(self) -> torch.Tensor | None:
        """[M] int64, on the CPU, the positions that predict trained tokens, in order: they go through the output head;
        None if most of them do, and all may."""
        if not self.only_trained:
            return None
        is_trained_T = self.loss_mask_T.cpu() > 0
        if self.tree is None:
            found_M = is_trained_T[1:].nonzero().squeeze(1)
        else:
            found_M = torch.unique(self.tree.predictor_T[is_trained_T])
        return found_M if 0 < len(found_M) < WORTH_PICKING * self.num_positions else None

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.numel() - 1

    @property
    def num_rollouts(self) -> int:
        return self.rollouts.numel() - 1

    @property
    def num_tokens(self) -> int:
        return self.token_ids_T.numel()

    @property
    def num_positions(self) -> int:
        """The tokens that a backend computes: fewer than `num_tokens` where sequences share some."""
        return self.num_tokens if self.tree is None else self.tree.num_positions
