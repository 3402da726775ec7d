"""A case measured, on every rank that torchrun started for it."""

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from headway.learner.config import ModelConfig, OptimizerConfig

from . import kernel_times
from .case import LEARNING_RATE, Case, TrainingStep
from .shapes import peak_flops, shape_of, step_flops
from .workload import sequences

PROFILED_STEPS = 2


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """A case as its processes get it."""

    case: Case
    model: str
    """The model's Hugging Face directory."""


def measure_ordered(spec: object) -> dict[str, Any]:
    """Return rank 0's figures. Collective."""
    order = msgspec.convert(spec, Order)
    began = time.perf_counter()
    training = open_training(order.case, order.model)
    figures = measure(order.case, training, opened_s=time.perf_counter() - began)
    if dist.is_initialized():
        dist.destroy_process_group()
    return figures


def open_training(case: Case, model: str) -> TrainingStep:
    """Open the case's model on this rank, with its share of the sequences."""
    shape = shape_of(case.shape, case.layers)
    given = sequences(case.drawn_lengths(), shape.vocabulary)
    optimizer = OptimizerConfig(learning_rate=LEARNING_RATE)
    if case.name.startswith("transformers"):
        from .baseline import BaselineTraining

        return BaselineTraining(case, Path(model), optimizer, given)
    from .ours import BackendTraining

    return BackendTraining(case, ModelConfig(path=model, dtype="bfloat16"), optimizer, given)


def measure(case: Case, training: TrainingStep, *, opened_s: float) -> dict[str, Any]:
    """Measure steps of equal work; the median counts."""
    on_gpu = case.device == "cuda"
    _tell(training, f"open after {opened_s:.1f} s")
    warm_up_s = [_timed_step(case, training, on_gpu) for _ in range(case.warm_up_steps)]
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    steps_s = [_timed_step(case, training, on_gpu) for _ in range(case.steps)]
    memory = _memory_gib(on_gpu)
    loss, grad_norm = training.step()
    figures = {
        **_speed(case, statistics.median(steps_s), torch.cuda.get_device_name() if on_gpu else "cpu"),
        **memory,
        "loss": loss,
        "grad_norm": grad_norm,
        "steps_s": _rounded(steps_s),
        "warm_up_s": _rounded(warm_up_s),
        "opened_s": round(opened_s, 1),
        "torch": torch.__version__,
        **training.facts,
    }
    return figures | (kernel_times.of_steps(training, PROFILED_STEPS, on_gpu) if case.profile else {})


def _timed_step(case: Case, training: TrainingStep, on_gpu: bool) -> float:
    """Return the seconds of the slowest rank."""
    _meet(on_gpu)
    began = time.perf_counter()
    loss, _ = training.step()
    _meet(on_gpu)
    seconds = time.perf_counter() - began
    _tell(training, f"{case.name}: a step of {seconds:.3f} s, loss {loss:.4f}")
    return seconds


def _meet(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def _speed(case: Case, step_s: float, device_name: str) -> dict[str, Any]:
    """Return the speed. MFU is of the model's own operations: those of recomputation and of padding do not count."""
    lengths = case.drawn_lengths()
    flops = step_flops(shape_of(case.shape, case.layers), lengths)
    achieved, peak = flops.total / step_s / case.processes, peak_flops(device_name)
    return {
        "tokens_per_s": round(sum(lengths) / step_s, 1),
        "tokens_per_s_per_device": round(sum(lengths) / step_s / case.processes, 1),
        "mfu": round(achieved / peak, 4) if peak else None,
        "model_tflops_per_device": round(achieved / 1e12, 3),
        "step_s": round(step_s, 4),
        "tokens": sum(lengths),
        "longest": max(lengths),
        "flops": {
            "active_parameters": flops.active_parameters,
            "matrices": f"6 * active_parameters * tokens = {flops.matrices:.4g}",
            "attention": f"12 * layers * heads * head_dim * sum(L * L) / 2 = {flops.attention:.4g}",
            "peak_per_device": peak,
        },
        "device": device_name,
    }


def _memory_gib(on_gpu: bool) -> dict[str, float | None]:
    """Return the memory of the rank that needs most: tensors, and the allocator's reserve for them."""
    if not on_gpu:
        return {"peak_memory_gib": None, "reserved_memory_gib": None}
    peaks = torch.tensor([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()], device="cuda")
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
    allocated, reserved = (round(peak / 2**30, 2) for peak in peaks.tolist())
    return {"peak_memory_gib": allocated, "reserved_memory_gib": reserved}


def _rounded(seconds: list[float]) -> list[float]:
    return [round(second, 4) for second in seconds]


def _tell(training: TrainingStep, words: str) -> None:
    if training.rank == 0:
        print(words, file=sys.stderr, flush=True)
