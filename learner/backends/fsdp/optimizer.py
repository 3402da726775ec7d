"""AdamW over shards: torch's own, or one whose moments live in CPU memory."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from headway.learner.config import OptimizerConfig

from .sharding import local

MOMENTS = ("exp_avg", "exp_avg_sq")

STREAMS = 2
"""One stream sends moments back to the CPU while the other fetches the next ones, so both directions are busy."""


def open_optimizer(
    parameters: Sequence[torch.Tensor], config: OptimizerConfig, *, on_cpu: bool, offload: bool
) -> torch.optim.AdamW:
    """Return AdamW with a learning rate of 0, which every step sets."""
    kind = OffloadedAdamW if offload else torch.optim.AdamW
    return kind(
        parameters,
        lr=0.0,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        foreach=on_cpu,
        fused=not on_cpu,
    )


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW whose moments live in CPU memory; each parameter's visit its device for the update.

    Only the moments travel, once a step. torch's `CPUOffloadPolicy` would send parameters for every
    micro-batch too, and update them on the CPU, which takes several times as long as the transfer.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Make one update. When this returns, the moments are back in CPU memory."""
        assert closure is None
        allocate_moments(self)
        for group in self.param_groups:
            updated = [parameter for parameter in group["params"] if parameter.grad is not None]
            streams = _new_streams() if group["fused"] else []
            for stream in streams:
                stream.wait_stream(torch.cuda.current_stream())
            for number, parameter in enumerate(updated):
                with torch.cuda.stream(streams[number % STREAMS] if streams else None):
                    self._update(parameter, group)
            for stream in streams:
                stream.synchronize()

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        shard = local(parameter)
        kept = [local(self.state[parameter][name]) for name in MOMENTS]
        exp_avg, exp_avg_sq = moments = [moment.to(shard.device, non_blocking=True, copy=True) for moment in kept]
        assert parameter.grad is not None
        adamw(
            [shard],
            [local(parameter.grad)],
            [exp_avg],
            [exp_avg_sq],
            [],
            [self.state[parameter]["step"]],
            foreach=False,
            fused=group["fused"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for moment, updated in zip(kept, moments, strict=True):
            moment.copy_(updated, non_blocking=True)


def _new_streams() -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream() for _ in range(STREAMS)]  # type: ignore[no-untyped-call]


def allocate_moments(optimizer: torch.optim.AdamW) -> None:
    """Make AdamW's state now: torch makes it with the first step, but saving before that, and loading, need it."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in optimizer.state:
                device = parameter.device if group["fused"] else torch.device("cpu")
                moment = _zeros_on_cpu if isinstance(optimizer, OffloadedAdamW) else torch.zeros_like
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=device),
                    **{name: moment(parameter) for name in MOMENTS},
                }


def _zeros_on_cpu(parameter: torch.Tensor) -> torch.Tensor:
    """Return zeros shaped and sharded like the parameter, in pinned memory if the parameter is on a GPU."""
    shard = local(parameter.detach())
    zeros = torch.zeros(shard.shape, dtype=shard.dtype, pin_memory=shard.is_cuda)
    if isinstance(parameter, DTensor):
        return DTensor(zeros, parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return zeros
