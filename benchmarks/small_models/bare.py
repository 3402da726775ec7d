"""The same module without sharding, its weights in bfloat16: forward and backward passes launched one by one, compiled,
and replayed as CUDA graphs."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from headway.learner.backends.fsdp.policy import Policy, prepare_layers
from headway.learner.backends.fsdp.row import FsdpRow
from headway.learner.backends.token_logprobs import token_logprobs
from headway.learner.batching.batch import PackedBatch
from headway.learner.batching.cost import CostModel
from headway.learner.config import ComputeConfig, ModelConfig
from headway.learner.models.model import load_model

from .clock import profiled, timed, wait
from .rows import StepWork


class BareStep:
    """Forward and backward passes of one row."""

    def __init__(self, model: ModelConfig, compute: ComputeConfig, device: str, *, mode: str = "") -> None:
        """`mode`: the whole model is compiled as one in this mode of torch.compile, for rows of one length."""
        dtype = torch.bfloat16 if model.dtype == "bfloat16" else torch.float32
        loaded = load_model(model).to(device=device, dtype=dtype)
        self._policy = Policy(loaded, on_cpu=device == "cpu", half_precision=dtype is torch.bfloat16)
        prepare_layers(self._policy.layers, compute)
        self.parameters = [one for one in self._policy.parameters() if one.requires_grad]
        self._hidden = self._policy.hidden
        if mode:
            self._hidden = torch.compile(self._policy.hidden, dynamic=False, mode=mode)
        self._weight = self._policy.model.get_output_embeddings().weight

    def row(self, work: StepWork, vocabulary: int) -> FsdpRow:
        """Return the first row of the work."""
        return self.of(work.rows(vocabulary, CostModel())[0])

    def of(self, batch: PackedBatch) -> FsdpRow:
        """Return a batch as a row on the device."""
        return self._policy.row(batch)

    def forward(self, row: FsdpRow) -> torch.Tensor:
        """[N] logprobs."""
        return token_logprobs(self._hidden(row), self._weight, row.next_ids_N, 1.0)

    def hidden_only(self, row: FsdpRow) -> torch.Tensor:
        """[N, H] without the head."""
        return self._hidden(row)

    def gradients(self, row: FsdpRow) -> tuple[torch.Tensor, ...]:
        """Return the gradients of a sum of logprobs."""
        return torch.autograd.grad(self.forward(row).sum(), self.parameters)


def measured(step: BareStep, row: FsdpRow) -> dict[str, Any]:
    """Return the milliseconds of the passes, launched and replayed, and how far the replayed gradients are off."""
    began = time.perf_counter()
    wanted = step.gradients(row)
    wait()
    found: dict[str, Any] = {"first_s": round(time.perf_counter() - began, 2), "positions": len(row.token_ids_N)}
    with torch.no_grad():
        found["hidden"] = timed(lambda: step.hidden_only(row))
        found["forward"] = timed(lambda: step.forward(row))
    found["both"] = timed(lambda: step.gradients(row))
    if not torch.cuda.is_available():
        return found
    found["profile"] = profiled(lambda: step.gradients(row))
    try:
        found |= _replayed(step, row, wanted)
    except RuntimeError as error:
        found["graph_error"] = str(error)[:400]
    return found


def _replayed(step: BareStep, row: FsdpRow, wanted: Sequence[torch.Tensor]) -> dict[str, Any]:
    began = time.perf_counter()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step.gradients(row)
    torch.cuda.current_stream().wait_stream(side)
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    pool = torch.cuda.graph_pool_handle()
    with torch.cuda.graph(forward, pool=pool):
        logprobs_N = step.forward(row)
    grad_N = torch.ones_like(logprobs_N)
    with torch.cuda.graph(backward, pool=pool):
        gradients = torch.autograd.grad(logprobs_N, step.parameters, grad_N)
    capture_s = time.perf_counter() - began

    def both() -> None:
        forward.replay()
        backward.replay()

    both()
    wait()
    off = max(
        float((one.float() - other.float()).norm() / (other.float().norm() + 1e-12))
        for one, other in zip(gradients, wanted, strict=True)
    )
    return {
        "capture_s": round(capture_s, 2),
        "graph_forward": timed(forward.replay),
        "graph_both": timed(both),
        "graph_off": off,
        "graph_gib": round(torch.cuda.memory_reserved() / 2**30, 2),
        "graph_profile": profiled(both),
    }


def optimizers(step: BareStep) -> dict[str, Any]:
    """Return the milliseconds of what follows the gradients: AdamW of fp32 weights, rounding, adding, norms."""
    masters = [one.detach().float() for one in step.parameters]
    flat = torch.cat([one.flatten() for one in masters])
    halves = [one.detach().clone() for one in step.parameters]
    gradients = [torch.full_like(master, 1e-3) for master in masters]
    for master, gradient in zip([*masters, flat], [*gradients, torch.full_like(flat, 1e-3)], strict=True):
        master.grad = gradient
    found: dict[str, Any] = {}
    calls: dict[str, Callable[[], object]] = {
        "round": lambda: torch._foreach_copy_(halves, masters),
        "add": lambda: torch._foreach_add_(gradients, halves),
        "norms": lambda: torch._foreach_norm(gradients),
        "flat norm": lambda: flat.square().sum(),
    }
    calls["adamw fused"] = torch.optim.AdamW(masters, lr=1e-6, fused=True).step
    calls["adamw foreach"] = torch.optim.AdamW(masters, lr=1e-6, foreach=True).step
    calls["adamw fused flat"] = torch.optim.AdamW([flat], lr=1e-6, fused=True).step
    for name, call in calls.items():
        found[name] = timed(call)
    return found
