"""The engine's logprobs of the first batch against the learner's: both must compute the same model.

A difference that rounding does not explain has a cause that no later error names: sequences that leak into each other,
another rotation of positions, an epsilon or a soft cap that one of both leaves out. Training on it would only look like
a run that does not learn.
"""

import logging
import math
from collections.abc import Callable, Sequence

import torch

from headway.broker.errors import LASTING_EXIT, HeadwayError
from headway.learner.batching.batch import PackedBatch
from headway.learner.ranks import Ranks

log = logging.getLogger(__name__)

EXPLAINED = {"float32": 2e-3, "float16": 0.05, "bfloat16": 0.25}
"""The mean absolute difference of a sampled token's logprob that rounding explains, by number format. Measured are
5e-6 in float32, and in bfloat16 up to 0.06 of dense models and 0.14 of experts whose routers choose for themselves."""
EXACT = 5e-4
"""The same in float32 on CPUs, whose products are not rounded to fewer bits as those of GPUs may be."""
QUANTIZED = 0.75
"""The same where an engine holds its weights or its cache in fewer bits."""
FEW = 4.0
"""The allowance for few tokens: the bound is this over the square root of the number of tokens greater."""


class DisagreementError(HeadwayError):
    """Engine and learner compute different models."""

    exit_code = LASTING_EXIT


class LogprobAgreement:
    """Compares the fresh tokens of the first batch that has some, before it is trained. Tokens of older weights, or of
    the weights that the learner before a resume had at the same step, say nothing. Collective over the ranks."""

    def __init__(self, ranks: Ranks, bound: float, *, is_cut: bool = False) -> None:
        """`bound`: of the mean absolute difference; 0: nothing is compared. `is_cut`: the engine samples from a part of
        the vocabulary, by top_p or top_k, in which a token is likelier: then a token counts by how much likelier it is
        to the learner, and one that is less likely as 0."""
        self._ranks, self._bound, self._is_cut = ranks, bound, is_cut
        self._is_due = bound > 0

    def compare(
        self,
        batches: Sequence[PackedBatch],
        logprobs: Callable[[Sequence[PackedBatch]], Sequence[torch.Tensor]],
        step: int,
        *,
        is_of_this_learner: bool,
    ) -> dict[str, float]:
        """Returns figures of the comparison, with the logprobs that the learner computes for the batches; none where it
        is not due. `is_of_this_learner`: see `Updater.update`. Raises DisagreementError."""
        if not self._is_due:
            return {}
        fresh = sum(float(_fresh(batch).sum()) for batch in batches)
        fresh, others = self._ranks.sum([fresh, float(not is_of_this_learner)])
        if not fresh or others:
            return {}
        off = [
            (own_T.cpu().double() - batch.behavior_logprobs_T.cpu().double())[_fresh(batch)]
            for batch, own_T in zip(batches, logprobs(batches), strict=True)
        ]
        off_N = torch.cat([*off, torch.zeros(0, dtype=torch.float64)])
        off_N = off_N.clamp(min=0) if self._is_cut else off_N.abs()
        total, tokens = self._ranks.sum([float(off_N.sum()), float(off_N.numel())])
        worst = self._ranks.max([float(off_N.max()) if off_N.numel() else 0.0])[0]
        self._is_due = False
        self._judge(total / tokens, worst, int(tokens), step)
        return {"agreement_mean": total / tokens, "agreement_worst": worst, "agreement_tokens": tokens}

    def _judge(self, mean: float, worst: float, tokens: int, step: int) -> None:
        bound = self._bound * (1 + FEW / math.sqrt(tokens))
        message = (
            f"the engine's and the learner's logprobs of {tokens} fresh tokens of step {step + 1} differ by {mean:.3g}"
            f" in the mean, {worst:.3g} at worst"
        )
        if mean <= bound:  # NaN is refused
            if self._ranks.is_first:
                log.info("%s (bound %.3g)", message, bound)
            return
        raise DisagreementError(
            f"Nothing was trained: {message}, where rounding explains {bound:.3g}. They do not compute the same model:"
            " look for an architecture or an option of model.path's config.json that one of both does not support, and"
            " for engine.options that change the model. Where the engine rounds more than its number format says, set"
            " learner.agreement_bound; 0 leaves the comparison out."
        )


def _fresh(batch: PackedBatch) -> torch.Tensor:
    """[T] bool, on the CPU: tokens that are trained and that the present weights sampled."""
    return ((batch.loss_mask_T > 0) & (batch.lags_T == 0)).cpu()
