"""What both backends do with the experts that a batch says to take.

N tokens of a rank, L layers with experts, K experts chosen for each.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Recorded:
    """The choices of one layer, or of all layers, and where it is counted how often the learner's router disagrees."""

    experts_NLK: torch.Tensor
    """-1 where the router chooses itself. [N, K] for one layer."""
    tally_2: torch.Tensor
    """int64: of the recorded choices, those that the learner's own router would not have made; all of them."""

    def of_layer(self, layer: int) -> "Recorded":
        """Of the layer that is number `layer` among those with experts."""
        return Recorded(self.experts_NLK[:, layer], self.tally_2)

    def part(self, take: Callable[[torch.Tensor], torch.Tensor]) -> "Recorded":
        """The same for some of the tokens."""
        return Recorded(take(self.experts_NLK), self.tally_2)

    def instead_of(self, own_NK: torch.Tensor) -> torch.Tensor:
        """[N, K] int64: what was recorded, else `own_NK`. Where there is a gradient, disagreement is counted."""
        recorded_NK = self.experts_NLK.to(own_NK.dtype)
        is_recorded_NK = recorded_NK >= 0
        if torch.is_grad_enabled():
            is_own_NK = (recorded_NK[:, :, None] == own_NK[:, None, :]).any(-1)
            self.tally_2.add_(torch.stack([(is_recorded_NK & ~is_own_NK).sum(), is_recorded_NK.sum()]))
        return torch.where(is_recorded_NK, recorded_NK, own_NK)


def disagreement(tally_2: torch.Tensor) -> dict[str, float]:
    """As a batch's report says it; {} where nothing was replayed. Waits for the device."""
    different, replayed = tally_2.tolist()
    if not replayed:
        return {}
    return {"router_disagreement_sum": float(different), "router_disagreement_count": float(replayed)}
