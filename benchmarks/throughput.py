"""Tokens a second, MFU and memory of the learner alone, of long-tailed lengths, of full rows and of shared prompts.

    python -m benchmarks.throughput --shape qwen3-1.7b [--layers N] [--backends fsdp,megatron] [--processes N]
        [--layout tensor=2,expert=2] [--lengths 1024,16384] [--whole 8192] [--groups 8,16 --prompts 64,1024]
        [--sharing never,auto] [--tokens 65536] [--budget 16384] [--compile] [--device cuda|cpu]

Each backend runs in processes of its own, one a GPU, under GRPO. `--lengths MEDIAN,LONGEST` draws lognormal lengths,
`--whole N` measures samples of exactly N tokens without a prompt, so that rows are full, and `--groups` with
`--prompts` groups of so many samples of one prompt, whose responses have about `--responses` tokens and share nothing.
Each workload is packed under each value of `--sharing`, of `learner.prefix_sharing`; settings that pack the same rows
are measured once, and the others are compared with the first one.

`update_s` is the update alone, `step_s` has the proximal logprobs before it. `computed` tokens are those that went
through the layers. `mfu` is of the update: the model's own operations for all samples, each with a prompt of its own,
forward and backward, against the device's peak; sharing can thus bring it above 1. A workload that fails, as for too
little memory, says why, and the next one begins with a new backend. The last line is one JSON object.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from . import command
from .models import SHAPES, flops_of, peak_flops, shape_of, step_flops, written
from .processes import isolated, last_words

if TYPE_CHECKING:
    from headway.learner.backends.base import Backend
    from headway.learner.batching.batch import PackedBatch
    from headway.learner.batching.packing import PackableSequence

LEARNING_RATE = 1e-6
SHORTEST = 32
LONGEST_PROMPT = 256
LONG_TAILED, SPREAD = 1.0, 0.5
"""The standard deviations of the logarithm of lengths: of long-tailed samples, and of the responses of a group."""
MOST_RECORDED = 8
"""A backend that has recorded more CUDA graphs is opened anew for the next workload, as it records only so many."""
Sharing = Literal["never", "auto", "always"]


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """The samples of a step."""

    lengths: tuple[int, int] | None = None
    """The median and the longest of lognormal lengths."""
    whole: int = 0
    """The tokens of each sample, all of which are alike."""
    group: int = 1
    prompt: int = 0
    responses: int = 0
    tokens: int = 0
    """About the number of all tokens; 0: `samples` decides."""
    samples: int = 64

    def draw(self, vocabulary: int) -> "list[PackableSequence]":
        """Return the samples, the same every time."""
        if self.lengths is not None:
            rng, (median, longest) = np.random.default_rng(0), self.lengths
            drawn = rng.lognormal(np.log(median), LONG_TAILED, self.samples).clip(min(SHORTEST, longest), longest)
            return [_sequence(rng, length, vocabulary) for length in drawn.astype(int)]
        if self.whole:
            return list(samples(max(1, self.tokens // self.whole), 1, 0, self.whole, vocabulary, spread=0.0))
        count = min(self.samples, max(self.group, self.tokens // (self.prompt + self.responses)))
        return list(samples(count, self.group, self.prompt, self.responses, vocabulary))


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """A backend's measurement, as its processes get it."""

    backend: str
    shape: str
    model: str
    """The model's Hugging Face directory."""
    layers: int = 0
    layout: dict[str, int] = {}
    compute: dict[str, Any] = {}
    workloads: tuple[Workload, ...]
    sharing: tuple[Sharing, ...] = ("never",)
    budget: int = 16384
    steps: int = 5
    warm_ups: int = 2
    seconds: float = 3600.0
    """No workload begins later."""
    device: str = "cuda"


def samples(
    count: int, group: int, prompt: int, response: int, vocabulary: int, *, spread: float = SPREAD
) -> "Iterator[PackableSequence]":
    """Yield whole groups, `count` samples or as few more as it takes. Responses are at most four times `response`."""
    rng = np.random.default_rng(0)
    for _ in range(-(-count // group)):
        beginning = rng.integers(0, vocabulary, prompt)
        for length in (response * rng.lognormal(0, spread, group)).clip(1, 4 * response).astype(int):
            yield _packable(rng, beginning, length, vocabulary, float(rng.normal()))


def _sequence(rng: np.random.Generator, length: int, vocabulary: int) -> "PackableSequence":
    prompt = rng.integers(0, vocabulary, min(LONGEST_PROMPT, max(1, length // 4)))
    return _packable(rng, prompt, length - len(prompt), vocabulary, float(rng.normal()))


def _packable(
    rng: np.random.Generator, prompt: Any, length: int, vocabulary: int, advantage: float
) -> "PackableSequence":
    """Return random tokens with behavior logprobs near those of random weights, so that ratios are near 1."""
    from headway.learner.batching.packing import PackableSequence

    return PackableSequence(
        token_ids=np.concatenate([prompt, rng.integers(0, vocabulary, length)]).astype(np.int32),
        prompt_length=len(prompt),
        loss_mask=np.ones(length, np.uint8),
        behavior_logprobs=np.full(length, -np.log(vocabulary), np.float32),
        lags=np.zeros(length, np.int64),
        advantages=np.full(length, advantage, np.float32),
    )


class Learner:
    """A backend in training as the learner drives it, opened anew where a workload leaves it in no state to go on."""

    def __init__(self, order: Order) -> None:
        from headway.learner.algorithm_config import AlgorithmConfig
        from headway.learner.objective.loss import Objective

        self.order, self.shape = order, shape_of(order.shape, order.layers)
        self.objective = Objective(AlgorithmConfig(), is_one_update=True)
        self._backend: Backend | None = None

    @property
    def backend(self) -> "Backend":
        from headway.learner.backends import open_backend
        from headway.learner.config import ComputeConfig, LayoutConfig, ModelConfig, OptimizerConfig

        if self._backend is None:
            order = self.order
            self._backend = open_backend(
                order.backend,
                ModelConfig(path=order.model, dtype="bfloat16" if order.device == "cuda" else "float32"),
                OptimizerConfig(learning_rate=LEARNING_RATE),
                device=order.device,
                layout=LayoutConfig(**order.layout),
                compute=ComputeConfig(**order.compute),
            )
        return self._backend

    def renew(self, *, has_failed: bool) -> None:
        """Free a backend that has failed, or has recorded many shapes."""
        import torch

        replayed = getattr(self._backend, "_replayed", None)
        if has_failed or (replayed is not None and replayed.num_recorded > MOST_RECORDED):
            self._backend = None
            gc.collect()
            if self.order.device == "cuda":
                torch.cuda.empty_cache()

    def plan(self, given: "Sequence[PackableSequence]", sharing: Sharing) -> "list[PackedBatch]":
        """Return this rank's rows, as `learner.objective.update` packs them."""
        from headway.learner.batching.clusters import pack_units
        from headway.learner.batching.cost import CostModel
        from headway.learner.config import ModelConfig
        from headway.learner.models.pretrained import load_config
        from headway.learner.models.shape import shape_of as model_shape_of

        shape = model_shape_of(load_config(ModelConfig(path=self.order.model)))
        is_replayed = getattr(self.backend, "_replayed", None) is not None
        rows = pack_units(
            [[one] for one in given],
            replica=self.backend.replica,
            replicas=self.backend.replicas,
            micro_batch_tokens=self.order.budget,
            cost=CostModel.of_model(shape, self.order.device, is_replayed=is_replayed),
            prefix_sharing=sharing,
        )
        return [replace(row.batch, only_trained=True) for row in rows]

    def update(self, batches: "list[PackedBatch]") -> tuple[float, float]:
        """Take one update, and return its loss and the norm of its gradient. Collective."""
        from headway.learner.ranks import Ranks

        loss = self.objective.token_loss(batches, Ranks.of(self.backend).sum)
        total, norm, _ = self.backend.step(batches, loss, 1.0, LEARNING_RATE)
        return total, norm


def measure_ordered(told: object) -> list[dict[str, Any]]:
    """Return rank 0's figures of each workload. Collective."""
    import torch

    from headway.learner.config import LearnerConfig

    torch.set_num_threads(LearnerConfig().threads)  # as the learner does; more wait for each other on a busy host
    order, began = msgspec.convert(told, Order), time.perf_counter()
    learner, found = Learner(order), []
    for workload in order.workloads:
        if time.perf_counter() - began > order.seconds:
            break
        try:
            figures = measured(learner, workload)
        except RuntimeError as error:  # mostly too little memory, which torch and cuBLAS say in their own ways
            figures = {"error": f"{type(error).__name__}: {error}"[:400]}
        found.append({"workload": msgspec.to_builtins(workload), **figures})
        if not int(os.environ.get("RANK", 0)):
            command.tell(json.dumps(found[-1]))
        learner.renew(has_failed="error" in figures)
    return found


def measured(learner: Learner, workload: Workload) -> dict[str, Any]:
    """Measure steps of a workload under every setting, which take turns, so that a busy machine slows all of them."""
    import torch

    order, given = learner.order, workload.draw(learner.shape.vocabulary)
    plans = {sharing: learner.plan(given, sharing) for sharing in order.sharing}
    first, *others = order.sharing
    same = {name for name in others if _is_same(plans[name], plans[first])}
    apart = {name: batches for name, batches in plans.items() if name not in same}
    took_s: dict[str, list[tuple[float, float]]] = {name: [] for name in apart}
    found: dict[str, dict[str, Any]] = {}
    for _ in range(order.warm_ups + order.steps):
        for name, batches in apart.items():
            if order.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            _meet(order)
            began = time.perf_counter()
            learner.backend.logprobs(batches, 1.0)
            _meet(order)
            updated = time.perf_counter()
            loss, norm = learner.update(batches)
            _meet(order)
            ended = time.perf_counter()
            took_s[name].append((ended - began, ended - updated))
            found[name] = {"loss": loss, "grad_norm": norm, "peak_gib": _peak_gib(order)}
    figures: dict[str, Any] = {"samples": len(given)}
    for name, batches in apart.items():
        step_s, update_s = (statistics.median(of) for of in zip(*took_s[name][order.warm_ups :], strict=True))
        found[name] |= {"step_s": round(step_s, 4), "update_s": round(update_s, 4)}
        figures[name] = found[name] | _speed(learner, given, batches, update_s)
    for name in others:
        figures[f"times_faster_{name}"] = (
            f"the rows of {first}" if name in same else round(found[first]["step_s"] / found[name]["step_s"], 3)
        )
    return figures


def _speed(
    learner: Learner, given: "Sequence[PackableSequence]", batches: "Sequence[PackedBatch]", update_s: float
) -> dict[str, Any]:
    """Return the speed of an update, of all replicas together; operations that are repeated do not count in `mfu`."""
    import torch

    from headway.learner.ranks import Ranks

    order, tokens, devices = learner.order, sum(len(one.token_ids) for one in given), learner.backend.world_size
    headless = sum(0 if batch.picked is None else batch.num_positions - len(batch.picked) for batch in batches)
    of_rank = sum(batch.num_positions for batch in batches), sum(map(doubled_pairs, batches)), headless
    computed, pairs, headless = map(round, Ranks.of(learner.backend).sum([*map(float, of_rank)]))
    speed = {
        "tokens": tokens,
        "computed": computed,
        "micro_batches": len(batches),
        "tokens_per_s": round(tokens / update_s, 1),
        "tokens_per_s_per_device": round(tokens / update_s / devices, 1),
    }
    peak = peak_flops(torch.cuda.get_device_name()) if order.device == "cuda" else None
    if peak:
        wanted = step_flops(learner.shape, [len(one.token_ids) for one in given]).total
        flops = flops_of(learner.shape, computed, pairs, headless).total
        speed["mfu"] = round(wanted / update_s / peak / devices, 4)
        speed["mfu_computed"] = round(flops / update_s / peak / devices, 4)
    return speed


def doubled_pairs(batch: "PackedBatch") -> int:
    """Return twice the pairs of tokens, one of which attends to the other, that a row computes: L^2 for a sequence of L
    tokens alone."""
    tree = batch.tree
    if tree is None:
        return int(batch.cu_seqlens.diff().long().square().sum())
    paths, runs = tree.cu_paths.diff().long(), tree.cu_runs.diff().long()
    return int((paths.square() - (paths - runs).square()).sum())


def _is_same(batches: "Sequence[PackedBatch]", others: "Sequence[PackedBatch]") -> bool:
    return len(batches) == len(others) and all(batch.tree is None for batch in (*batches, *others))


def _meet(order: Order) -> None:
    """Wait for the GPU and for all ranks."""
    import torch
    from torch import distributed

    if order.device == "cuda":
        torch.cuda.synchronize()
    if distributed.is_initialized() and distributed.get_world_size() > 1:
        distributed.barrier()


def _peak_gib(order: Order) -> float | None:
    import torch

    return round(torch.cuda.max_memory_allocated() / 2**30, 2) if order.device == "cuda" else None


def main() -> int:
    """Return the exit code: 1 if a backend failed."""
    options = _parse()
    command.end_children_at_sigterm()
    model = written(
        options.shape, options.layers, models=options.models, device=options.device, timeout_s=options.timeout_s
    )
    compute = {name: getattr(options, name) for name in ("recompute", "compile", "cuda_graphs")}
    order = Order(
        backend="",
        shape=options.shape,
        layers=options.layers,
        model=str(model),
        layout=options.layout,
        workloads=tuple(_workloads(options)),
        sharing=tuple(options.sharing),
        **{name: getattr(options, name) for name in ("budget", "steps", "warm_ups", "seconds", "device")},
    )
    backends, failed = dict[str, Any](), dict[str, str]()
    for backend in options.backends:
        own = {**compute, "compile": options.compile and backend != "megatron"}
        given = msgspec.structs.replace(order, backend=backend, compute=own)
        function = "benchmarks.throughput:measure_ordered"
        outcome = isolated(function, msgspec.to_builtins(given), options.processes, options.timeout_s)
        if "error" in outcome:
            failed[backend] = last_words(outcome)
            command.tell(outcome["error"])
        else:
            backends[backend] = outcome["result"]
    return command.finish({"shape": options.shape, "model": str(model), **backends, "failed": failed}, failed)


def _workloads(options: argparse.Namespace) -> Iterator[Workload]:
    if options.lengths:
        yield Workload(lengths=options.lengths, samples=options.samples)
    if options.whole:
        yield Workload(whole=options.whole, tokens=options.tokens)
    for group, prompt in product(options.groups, options.prompts):
        yield Workload(
            group=group, prompt=prompt, responses=options.responses, samples=options.samples, tokens=options.tokens
        )


def _parse() -> argparse.Namespace:
    parser = command.parser(__doc__, "throughput")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-1.7b")
    parser.add_argument("--layers", type=int, default=0, help="default: as many as the shape has")
    parser.add_argument("--backends", type=command.names, default=["fsdp"], metavar="NAME,...")
    parser.add_argument("--processes", type=int, default=1, help="one a GPU")
    parser.add_argument("--layout", type=_sizes, default={}, metavar="KEY=N,...", help="see LayoutConfig")
    parser.add_argument("--lengths", type=command.numbers, metavar="MEDIAN,LONGEST")
    parser.add_argument("--whole", type=int, default=0, metavar="N", help="measure full rows of such samples")
    parser.add_argument("--groups", type=command.numbers, default=[], metavar="N,...")
    parser.add_argument("--prompts", type=command.numbers, default=[64, 1024, 8192], metavar="N,...")
    parser.add_argument("--responses", type=int, default=256)
    parser.add_argument("--samples", type=int, default=64, help="at most so many in a workload")
    parser.add_argument("--tokens", type=int, default=1 << 20, help="fewer samples where they have more tokens")
    parser.add_argument("--sharing", type=command.names, default=["never"], metavar="NAME,...")
    parser.add_argument("--budget", type=int, default=16384, help="tokens of a micro-batch")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm-ups", type=int, default=2)
    parser.add_argument("--recompute", default="none", choices=("none", "selective", "full"))
    parser.add_argument("--compile", action="store_true", help="torch.compile the layers, but megatron's")
    parser.add_argument("--cuda-graphs", default="auto", choices=("auto", "never"))
    parser.add_argument("--seconds", type=float, default=3600.0, help="no workload begins later than this")
    parser.add_argument("--timeout-s", type=float, default=3600.0, help="of one backend")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--models", type=Path, help="default: in memory if it has room, else the temporary folder")
    options = parser.parse_args()
    if not (options.lengths or options.whole or options.groups):
        options.lengths = [1024, 16384]
    return options


def _sizes(text: str) -> dict[str, int]:
    return {key: int(value) for key, _, value in (part.partition("=") for part in text.split(","))}


if __name__ == "__main__":
    sys.exit(main())
