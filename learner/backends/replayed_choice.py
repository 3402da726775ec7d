"""The experts that a batch says to take, as both backends replay them.

N tokens of a rank, L layers with experts, K experts chosen for each.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Recorded:
    """The recorded choices of one layer or of all, and a count of those that the learner's router disagrees with."""

    experts_NLK: torch.Tensor
    """[N, L, K], or [N, K] for one layer; -1 where the router chooses for itself."""
    tally_2: torch.Tensor
    """int64 counts: recorded choices that the learner's own router would not have made; all recorded choices."""
    shares_N: torch.Tensor | None = None
    """[N] int64 the number of sequences for which a token is computed, each of which counts; None: one."""

    def of_layer(self, layer: int) -> "Recorded":
        """The choices of the layer that is number `layer` among those with experts."""
        return Recorded(self.experts_NLK[:, layer], self.tally_2, self.shares_N)

    def part(self, take: Callable[[torch.Tensor], torch.Tensor]) -> "Recorded":
        """The choices of the tokens that `take` selects."""
        return Recorded(take(self.experts_NLK), self.tally_2, None if self.shares_N is None else take(self.shares_N))

    def instead_of(self, own_NK: torch.Tensor) -> torch.Tensor:
        """[N, K] int64: the recorded experts, else `own_NK`. Counts disagreement if gradients are enabled."""
        recorded_NK = self.experts_NLK.to(own_NK.dtype)
        is_recorded_NK = recorded_NK >= 0
        if torch.is_grad_enabled():
            is_own_NK = (recorded_NK[:, :, None] == own_NK[:, None, :]).any(-1)
            counted_NK = is_recorded_NK * (1 if self.shares_N is None else self.shares_N[:, None])
            self.tally_2.add_(torch.stack([(counted_NK * ~is_own_NK).sum(), counted_NK.sum()]))
        return torch.where(is_recorded_NK, recorded_NK, own_NK)


def disagreement(tally_2: torch.Tensor) -> dict[str, float]:
    """The entries of a batch's report; {} if no choice was replayed. Waits for the device."""
    different, replayed = tally_2.tolist()
    if not replayed:
        return {}
    return {"router_disagreement_sum": float(different), "router_disagreement_count": float(replayed)}
