"""The load of experts: how evenly a step's tokens were spread over them."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from . import groups
from .model import PackedGpt
from .modules import ExpertLayer


@torch.no_grad()
def take_router_load(chunks: Sequence[PackedGpt]) -> dict[str, float]:
    """Return the metrics of all tokens since the last call; {} for a dense model. Collective.

    `expert_load`: the largest expert's tokens over the mean. `experts_idle`: the share of experts that got none. Each
    is of the layer where it is largest; the few tokens of padding count too.
    """
    layers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, ExpertLayer)]
    if not layers:
        return {}
    loads_LE = torch.stack([layer.load_E for layer in layers])
    for layer in layers:
        layer.load_E.zero_()
    for group in (groups.alike(), groups.tensor()):
        dist.all_reduce(loads_LE, group=group)
    largest = (loads_LE.amax(1) / loads_LE.mean(1).clamp(min=1)).max()
    idle = (loads_LE == 0).float().mean(1).max()
    worst = torch.stack([largest, idle])
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return dict(zip(("expert_load", "experts_idle"), worst.tolist(), strict=True))
