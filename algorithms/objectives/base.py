"""The seam between the learner and an objective."""

from typing import Protocol

import torch

from headway.algorithms.metrics import Metrics
from headway.algorithms.tokens import Tokens


class TokenObjective(Protocol):
    """A surrogate objective. Its options are further parameters, which have defaults and are passed by keyword."""

    def __call__(
        self, current_logprobs_T: torch.Tensor, anchor_logprobs_T: torch.Tensor, tokens: Tokens, /
    ) -> tuple[torch.Tensor, Metrics]:
        """Return the loss of each token [T], to be minimized, and metrics. Nothing is aggregated here.

        `current_logprobs_T` [T] have a gradient. `anchor_logprobs_T` [T] are the denominator of the ratio: the behavior
        policy's, or the proximal policy's. Losses must be finite where `tokens.loss_mask_T` is 0, whatever stands
        there. Metrics: pairs `NAME_sum`, `NAME_count` for means, as `masked_mean` makes them, and other names for
        maxima.
        """
        ...
