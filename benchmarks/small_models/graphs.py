"""The learner's update and logprobs with its kernels launched one by one, and replayed as CUDA graphs.

    never      FSDP2, launched: the learner with learner.compute.cuda_graphs=never
    again      the same once more: attention's backward pass adds in any order, so it differs from itself
    rounded    the same module without FSDP2, rows as they are, launched
    padded     rows padded, launched
    beside     auto, while another thread uses the device, as one that publishes weights does
    auto       rows padded, replayed: the learner with cuda_graphs=auto
    compiled   auto with compiled layers
    lora, lora-never, lora-compiled   always, never, and always and compiled, of an adapter of rank 16 alone

Every way starts with the same weights and makes the same updates, which are compared. On a CPU nothing is recorded:
`never` alone has a meaning there.
"""

import gc
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal
from unittest.mock import patch

import msgspec
import torch

from headway.learner.algorithm_config import AlgorithmConfig
from headway.learner.backends import open_backend
from headway.learner.backends.fsdp import sharded_model
from headway.learner.backends.fsdp.backend import FsdpBackend
from headway.learner.backends.fsdp.sharding import clip_gradients, local
from headway.learner.batching.batch import PackedBatch
from headway.learner.batching.cost import CostModel
from headway.learner.config import AdapterConfig, ComputeConfig, ModelConfig, OptimizerConfig
from headway.learner.objective.objective import Objective

from .clock import PartClock, timed, wait
from .rows import StepWork

WAYS = ("never", "again", "rounded", "padded", "beside", "auto", "compiled")
ADAPTED = ("lora-never", "lora", "lora-compiled")
TIMED = ("never", "auto", "compiled", *ADAPTED)

EXACT = {"beside": "padded", "auto": "padded", "compiled": "auto"}
"""A way to compare another way with, besides never."""

UPDATES = 3
FRESH = 8
"""Updates on rows of new samples each, one after another, which share shapes or do not."""

Tensors = list[torch.Tensor]


class Launched:
    """A recorder that records nothing: each repetition launches the kernels again."""

    def warm_up(self, call: Callable[[], object]) -> None:
        """Make the call."""
        call()

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        """Return the call."""
        return call

    def has_room(self) -> Literal[True]:
        """Nothing is held."""
        return True


class _Busy:
    """A thread that allocates, copies to host memory and waits, as long as the context is open."""

    def __init__(self, is_on: bool) -> None:
        self.copies, self.error = 0, ""
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._work) if is_on else None

    def __enter__(self) -> None:
        if self._thread is not None:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        try:
            while not self._ends.is_set():
                there = torch.full((1 << 22,), float(self.copies), device="cuda")
                here = torch.empty(1 << 22, pin_memory=True).copy_(there, non_blocking=True)
                torch.cuda.current_stream().synchronize()
                assert float(here[-1]) == self.copies
                self.copies += 1
        except Exception as error:  # noqa: BLE001  # it is reported
            self.error = f"{type(error).__name__}: {error}"[:400]


def measured(
    model: ModelConfig,
    device: str,
    works: Sequence[StepWork],
    vocabulary: int,
    ways: Sequence[str] = WAYS,
    limit_s: float = 75.0,
) -> dict[str, Any]:
    """Return each way's milliseconds for each amount of work, and how far its updates are off. A way that does not
    begin within the limit is left out."""
    found: dict[str, Any] = {}
    after: dict[str, tuple[list[float], Tensors]] = {}
    first: Tensors = []
    rows = [replace(works[0], seed=seed).rows(vocabulary, CostModel()) for seed in range(UPDATES)]
    whole = time.perf_counter()
    for way in ways:
        began = time.perf_counter()
        if began - whole > limit_s:
            found[way] = "left out: no time"
            continue
        backend = _opened(way, model, device)
        if way in ADAPTED:
            found[way] = {work.name: _timed(backend, work, vocabulary, device) for work in works}
            found[way]["recorded"] = 0 if backend._replayed is None else backend._replayed.num_recorded
            print(f"{way}: {json.dumps(found[way])}", file=sys.stderr, flush=True)
            del backend
            _collect()
            continue
        first = first or _weights(backend)
        thread = _Busy(way == "beside" and device == "cuda")
        with thread:
            after[way] = _trained(backend, rows)
        found[way] = {"losses_and_norms": [round(number, 6) for number in after[way][0]]}
        for other in dict.fromkeys(("never", EXACT.get(way, "never"))):
            if other != way:
                found[way][f"off_from_{other}"] = _off(after[way], after[other], first)
        for work in works if way in TIMED else ():
            found[way][work.name] = _timed(backend, work, vocabulary, device)
        if way == "beside":
            found[way]["thread"] = {"copies": thread.copies, "error": thread.error}
        if backend._replayed is not None:
            found[way]["recorded"] = backend._replayed.num_recorded
            found[way]["away"] = _away(backend, rows[0])
        found[way]["seconds"] = round(time.perf_counter() - began, 1)
        print(f"{way}: {json.dumps(found[way])}", file=sys.stderr, flush=True)
        del backend
        _collect()
    return found


def _collect() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _blocks() -> Iterator[tuple[int, int, str]]:
    """Yield the size of each segment that torch holds, that of its largest block in use, and its pool."""
    segments: Any = torch.cuda.memory_snapshot() if torch.cuda.is_available() else ()  # type: ignore[no-untyped-call]
    for segment in segments:
        used = [block["size"] for block in segment["blocks"] if block["state"] != "inactive"]
        yield segment["total_size"], max(used, default=0), str(segment.get("segment_pool_id"))


def _away(backend: FsdpBackend, rows: Sequence[PackedBatch]) -> dict[str, Any]:
    """Return the memory that is kept while the model is off the device (held, and in use), and how far its logprobs are
    off afterwards."""
    before = backend.logprobs(rows, 1.0)
    with backend.off_device():
        gib = [torch.cuda.memory_reserved() / 2**30, torch.cuda.memory_allocated() / 2**30]
        largest = sorted(_blocks(), reverse=True)[:8]
    after = backend.logprobs(rows, 1.0)
    return {
        "gib": [round(one, 3) for one in gib],
        "largest": largest,
        "off": max(float((a - b).abs().max()) for a, b in zip(before, after, strict=True)),
        "norm_after": _update(backend, rows)()[1],
    }


@contextmanager
def _recorder(way: str) -> Iterator[None]:
    if way != "padded":
        yield
        return
    with patch.object(sharded_model, "open_recorder", lambda _: Launched()):
        yield


def _opened(way: str, model: ModelConfig, device: str) -> FsdpBackend:
    is_launched = way in ("never", "again", "lora-never")
    replays: Literal["auto", "always"] = "always" if way in ADAPTED else "auto"  # auto launches an adapter's rows
    compute = ComputeConfig(cuda_graphs="never" if is_launched else replays, compile=way.endswith("compiled"))
    if way in ADAPTED:
        model = msgspec.structs.replace(model, adapter=AdapterConfig(rank=16, alpha=32.0))
    with _recorder(way):
        backend = open_backend("fsdp", model, OptimizerConfig(), device=device, compute=compute)
    assert isinstance(backend, FsdpBackend)
    if way == "rounded" and backend._replayed is not None:
        backend._replayed.stop("this way has none")
    return backend


def _weights(backend: FsdpBackend) -> Tensors:
    return [local(parameter.detach()).to("cpu", copy=True) for parameter in backend._parameters]


def _trained(backend: FsdpBackend, rows: Sequence[list[PackedBatch]]) -> tuple[list[float], Tensors]:
    """Return losses and norms of a few updates, each made thrice so that the last one is replayed, and the weights. As
    in a step, a pass without gradient comes first."""
    numbers: list[float] = []
    for batches in rows:
        for _ in range(3):
            backend.logprobs(batches, 1.0)
            loss, norm, _ = _update(backend, batches)()
            numbers += [loss, norm]
    return numbers, _weights(backend)


def _off(one: tuple[list[float], Tensors], other: tuple[list[float], Tensors], first: Tensors) -> dict[str, float]:
    """Return the largest difference of a loss and a norm, as a share of it, and the distance of the weights, as a share
    of the way that they went."""
    numbers, weights = one
    others, wanted = other
    shares = [abs(a - b) / (abs(b) + 1e-12) for a, b in zip(numbers, others, strict=True)]
    apart = sum(float((a - b).double().square().sum()) for a, b in zip(weights, wanted, strict=True)) ** 0.5
    went = sum(float((a - b).double().square().sum()) for a, b in zip(wanted, first, strict=True)) ** 0.5
    firsts = {"first_loss": shares[0], "first_norm": shares[1]}
    return firsts | {"loss": max(shares[::2]), "norm": max(shares[1::2]), "weights": apart / went}


def _update(backend: FsdpBackend, rows: Sequence[PackedBatch]) -> Callable[[], tuple[float, float, Any]]:
    objective = Objective(AlgorithmConfig(), is_one_update=True)
    return lambda: backend.step(rows, objective.token_loss(rows), 1.0, 1e-6)


def _timed(backend: FsdpBackend, work: StepWork, vocabulary: int, device: str) -> dict[str, Any]:
    rows = work.rows(vocabulary, CostModel())
    found: dict[str, Any] = {
        "micro_batches": len(rows),
        "computed": sum(row.num_positions for row in rows),
        "logprobs": timed(partial(backend.logprobs, rows, 1.0), warm_ups=3),
        "update": timed(_update(backend, rows), warm_ups=3),
        "parts": _parts(backend, rows),
        "fresh_ms": list(_fresh(backend, work, vocabulary)),
    }
    if device == "cuda":
        found["peak_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 2)
        found["gib"] = round(torch.cuda.memory_reserved() / 2**30, 2)
    return found


def _fresh(backend: FsdpBackend, work: StepWork, vocabulary: int) -> Iterator[float]:
    """Yield the milliseconds of updates on new rows each."""
    for seed in range(1, 1 + FRESH):
        update = _update(backend, replace(work, seed=seed).rows(vocabulary, CostModel()))
        wait()
        began = time.perf_counter()
        update()
        wait()
        yield round((time.perf_counter() - began) * 1e3, 1)


def _parts(backend: FsdpBackend, rows: Sequence[PackedBatch]) -> dict[str, Any]:
    """Return the milliseconds of an update's parts: until the process goes on, and until the device is done."""
    loss = Objective(AlgorithmConfig(), is_one_update=True).token_loss(rows)
    part = PartClock()
    rounded = backend._rounded
    for _ in range(3):
        part.clear()
        if rounded is not None:
            part("begin", rounded.begin)
        with backend._passing():
            for index, batch in enumerate(rows):
                outputs_T = part("forward", partial(backend._forward, batch, 1.0))
                share, _ = part("loss", partial(loss, index, outputs_T))
                part("backward", share.backward)
        if rounded is not None:
            rounded.give()
        part("clip", lambda: clip_gradients(backend._parameters, 1.0, backend._device))
        part("optimizer", backend._optimizer.step)
        part("zero_grad", lambda: backend._optimizer.zero_grad(set_to_none=True))
    return part.parts
