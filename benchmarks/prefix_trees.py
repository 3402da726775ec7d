"""The learner alone, with and without prefix trees: seconds of a step against how much a group's samples share.

    python -m benchmarks.prefix_trees [--shape smollm2-135m] [--groups 1,8,16] [--prompts 64,1024,8192]
        [--responses 256] [--samples 128] [--tokens 131072] [--whole 8192] [--budget 65536] [--compile]
        [--settings never,auto,always] [--cuda-graphs auto|never] [--kept-logits 6] [--whole-only] [--profile]
        [--seconds 300] [--device cuda|cpu]

A step has the backend's work under GRPO: proximal logprobs of all samples, then an update. Responses have lengths
around --responses (lognormal, at most four times as long) and share nothing, so trees save prompts alone. Each case is
packed by `pack_units` under each value of `learner.prefix_sharing`; settings that pack the same rows are measured once.
--whole N puts a case first whose samples have exactly N tokens and no prompt, so that rows are full.

`tokens` are those of all samples, `computed` those that went through the layers. `mfu` is of the update alone: the
model's own operations for all samples, each with a prompt of its own, forward and backward, against the device's peak.
Sharing can thus bring it above 1; `mfu_computed` counts the operations of what was computed: no shared token twice, and
no prompt in the output head, unless --all-logprobs wants it there. --profile adds where the time of an update goes. A
case that fails, as for too little memory, says why, and the next one begins with a new backend. The last line is one
JSON object; each case's figures are on standard error as soon as it ends.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.throughput import checkpoint
from benchmarks.throughput.kernel_groups import grouped
from benchmarks.throughput.shapes import Shape, flops_of, peak_flops, shape_of, step_flops
from headway.learner.backends import open_backend, token_logprobs
from headway.learner.backends.base import Backend, TokenLoss
from headway.learner.batching.batch import PackedBatch
from headway.learner.batching.clusters import PrefixSharing
from headway.learner.batching.cost import CostModel
from headway.learner.batching.packing import PackableSequence
from headway.learner.batching.units import pack_units
from headway.learner.config import ComputeConfig, LearnerConfig, ModelConfig, OptimizerConfig
from headway.learner.models.model import load_config
from headway.learner.models.shape import shape_of as model_shape_of

SHARINGS: tuple[PrefixSharing, ...] = ("never", "auto", "always")
WARM_UPS = 2
SPREAD = 0.5
"""The standard deviation of the logarithm of a response's length."""
MOST_RECORDED = 8
"""A backend that has recorded more shapes is opened anew for the next case, as it records only so many."""


def samples(
    count: int, group: int, prompt: int, response: int, vocabulary: int, seed: int = 0, *, spread: float = SPREAD
) -> Iterator[PackableSequence]:
    """Yield whole groups, `count` samples or as few more as it takes."""
    rng = np.random.default_rng(seed)
    for _ in range(-(-count // group)):
        beginning = rng.integers(0, vocabulary, prompt)
        for length in (response * rng.lognormal(0, spread, group)).clip(1, 4 * response).astype(int):
            ones = np.ones(length, np.float32)
            yield PackableSequence(
                token_ids=np.concatenate([beginning, rng.integers(0, vocabulary, length)]).astype(np.int32),
                prompt_length=prompt,
                loss_mask=np.ones(length, np.uint8),
                behavior_logprobs=-ones,
                lags=np.zeros(length, np.int64),
                advantages=np.float32(rng.normal()) * ones,
            )


def measure(
    backend: Backend, plans: dict[PrefixSharing, list[PackedBatch]], device: str, repeats: int, warm_ups: int = WARM_UPS
) -> dict[str, dict[str, Any]]:
    """Return the median duration of a step of each plan, packing left out, and its largest memory.

    The plans take turns, so that a busy machine slows all of them.
    """
    took_s: dict[str, list[float]] = {name: [] for name in plans}
    update_s: dict[str, list[float]] = {name: [] for name in plans}
    found: dict[str, dict[str, Any]] = {}
    for _ in range(warm_ups + repeats):
        for name, batches in plans.items():
            _reset_peak(device)
            began = time.perf_counter()
            proximal = backend.logprobs(batches, 1.0)
            _wait(device)
            updated = time.perf_counter()
            _, grad_norm, _ = backend.step(batches, _loss(batches, proximal), 1.0, 1e-6)
            _wait(device)
            took_s[name].append(time.perf_counter() - began)
            update_s[name].append(time.perf_counter() - updated)
            found[name] = {
                "computed": sum(batch.num_positions for batch in batches),
                "micro_batches": len(batches),
                "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if device == "cuda" else None,
                "grad_norm": grad_norm,
            }
    tokens = sum(batch.num_tokens for batch in next(iter(plans.values())))
    for setting, figures in found.items():
        step_s = statistics.median(took_s[setting][warm_ups:])
        figures |= {
            "step_s": round(step_s, 4),
            "update_s": round(statistics.median(update_s[setting][warm_ups:]), 4),
            "tokens_per_s": round(tokens / step_s),
            "tokens": tokens,
        }
    return found


def _loss(batches: list[PackedBatch], proximal: list[torch.Tensor]) -> TokenLoss:
    trained = sum(float(batch.loss_mask_T.sum()) for batch in batches)

    def loss(index: int, current_T: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        batch, ratio_T = batches[index], (current_T - proximal[index]).exp()
        return -(batch.loss_mask_T * batch.advantages_T * ratio_T).sum() / trained, {}

    return loss


def _reset_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def doubled_pairs(batch: PackedBatch) -> int:
    """Return twice the pairs of tokens, one of which attends to the other, that a row computes: L^2 for a sequence of L
    tokens alone."""
    tree = batch.tree
    if tree is None:
        return int(batch.cu_seqlens.diff().long().square().sum())
    paths, runs = tree.cu_paths.diff().long(), tree.cu_runs.diff().long()
    return int((paths.square() - (paths - runs).square()).sum())


def without_head(batch: PackedBatch) -> int:
    """Return the positions that do not go through the output head."""
    return 0 if batch.picked is None else batch.num_positions - len(batch.picked)


class Learner:
    """A backend for all cases, opened anew where one of them leaves it in no state for the next."""

    def __init__(self, options: argparse.Namespace, shape: Shape) -> None:
        directory = checkpoint.folder(options.models, options.shape, shape)
        checkpoint.write_isolated(shape, directory, options.device, 300.0)
        self.shape = shape
        self._options = options
        self._model = ModelConfig(path=str(directory), dtype="bfloat16" if options.device == "cuda" else "float32")
        self._backend: Backend | None = None
        self.cost = CostModel.of_model(
            model_shape_of(load_config(self._model)), options.device, is_replayed=self._is_replayed
        )

    @property
    def backend(self) -> Backend:
        """The open backend."""
        if self._backend is None:
            options = self._options
            compute = ComputeConfig(
                compile=options.compile, recompute=options.recompute, cuda_graphs=options.cuda_graphs
            )
            self._backend = open_backend("fsdp", self._model, OptimizerConfig(), device=options.device, compute=compute)
        return self._backend

    def close(self) -> None:
        """Free the backend's memory."""
        self._backend = None
        gc.collect()
        if self._options.device == "cuda":
            torch.cuda.empty_cache()

    def renew(self) -> None:
        """Close a backend that has recorded many shapes."""
        if self.num_recorded > MOST_RECORDED:
            self.close()

    @property
    def num_recorded(self) -> int:
        """The number of shapes that have CUDA graphs."""
        replayed = getattr(self._backend, "_replayed", None)
        return 0 if replayed is None else int(replayed.num_recorded)

    @property
    def _is_replayed(self) -> bool:
        return getattr(self.backend, "_replayed", None) is not None


def measured_case(
    learner: Learner, given: Sequence[PackableSequence], settings: Sequence[PrefixSharing], options: argparse.Namespace
) -> dict[str, Any]:
    """Measure an update of these samples under every setting."""
    plans: dict[PrefixSharing, list[PackedBatch]] = {}
    pack_s = {}
    for prefix_sharing in settings:
        began = time.perf_counter()
        rows = pack_units(
            [[one] for one in given],
            replica=0,
            replicas=1,
            micro_batch_tokens=options.budget,
            cost=learner.cost,
            prefix_sharing=prefix_sharing,
        )
        pack_s[prefix_sharing] = round(time.perf_counter() - began, 4)
        # as `learner.objective.update` does
        plans[prefix_sharing] = [replace(row.batch, only_trained=not options.all_logprobs) for row in rows]
    first = settings[0]
    same = [name for name in settings[1:] if len(plans[name]) == len(plans[first]) and _has_no_tree(plans[name])]
    apart = {name: batches for name, batches in plans.items() if name not in same}
    measured = measure(learner.backend, apart, options.device, options.repeats, options.warm_ups)
    wanted = step_flops(learner.shape, [len(one.token_ids) for one in given]).total
    peak = peak_flops(torch.cuda.get_device_name()) if options.device == "cuda" else None
    found: dict[str, Any] = {"samples": len(given), "recorded": learner.num_recorded}
    for name, batches in apart.items():
        figures = measured[name]
        figures |= {"pack_s": pack_s[name], "update_tokens_per_s": round(figures["tokens"] / figures["update_s"])}
        if peak:
            headless = sum(map(without_head, batches))
            computed = flops_of(learner.shape, figures["computed"], sum(map(doubled_pairs, batches)), headless).total
            figures["mfu"] = round(wanted / figures["update_s"] / peak, 3)
            figures["mfu_computed"] = round(computed / figures["update_s"] / peak, 3)
        if options.profile and options.device == "cuda":
            loss = _loss(batches, learner.backend.logprobs(batches, 1.0))
            figures["profile"] = grouped(partial(learner.backend.step, batches, loss, 1.0, 1e-6))
        found[name] = figures
    for name in settings[1:]:
        found[f"times_faster_{name}"] = (
            f"the rows of {first}" if name in same else round(found[first]["step_s"] / found[name]["step_s"], 3)
        )
    return found


def _has_no_tree(batches: Sequence[PackedBatch]) -> bool:
    return all(batch.tree is None for batch in batches)


def cases(options: argparse.Namespace, vocabulary: int) -> Iterator[tuple[dict[str, Any], list[PackableSequence]]]:
    """Yield each case's name and samples, the one of whole rows first."""
    for tokens in (options.whole_tokens or [options.tokens]) if options.whole else ():
        count = max(1, tokens // options.whole)
        whole = samples(count, 1, 0, options.whole, vocabulary, spread=0.0)
        yield {"whole_rows_of": options.whole}, list(whole)
    for group, prompt in () if options.whole_only else product(options.groups, options.prompts):
        count = min(options.samples, max(group, options.tokens // (prompt + options.responses)))
        yield (
            {"group": group, "prompt": prompt},
            list(samples(count, group, prompt, options.responses, vocabulary)),
        )


def main() -> None:
    """Measure all cases, as the command line says."""
    options, began = _parse(), time.perf_counter()
    torch.set_num_threads(LearnerConfig().threads)  # as the learner does; more wait for each other on a busy host
    if options.kept_logits:
        token_logprobs.KEPT_LOGITS = token_logprobs.KEPT_LOGITS_OF_LARGE = options.kept_logits << 30
    learner = Learner(options, shape_of(options.shape, options.layers))
    found = []
    for name, given in cases(options, learner.shape.vocabulary):
        if time.perf_counter() - began > options.seconds:
            break
        settings = options.settings[:1] if "whole_rows_of" in name else options.settings
        started = time.perf_counter()
        try:
            case = measured_case(learner, given, settings, options)
        except RuntimeError as error:  # mostly too little memory, which torch and cuBLAS say in their own ways
            case = {"error": f"{type(error).__name__}: {error}"[:400]}
        found.append(name | case | {"seconds": round(time.perf_counter() - started, 1)})
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
        if "error" in case:
            learner.close()
        learner.renew()
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    told = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    print(json.dumps({"device_name": device, "torch": torch.__version__, "options": told, "cases": found}))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--layers", type=int, default=0, help="default: as many as the shape has")
    parser.add_argument("--groups", type=_numbers, default="1,8,16", metavar="N,...")
    parser.add_argument("--prompts", type=_numbers, default="64,1024,8192", metavar="N,...")
    parser.add_argument("--responses", type=int, default=256)
    parser.add_argument("--samples", type=int, default=128, help="as many in a case, but for --tokens")
    parser.add_argument("--tokens", type=int, default=1 << 20, help="fewer samples where they have more tokens")
    parser.add_argument("--whole", type=int, default=0, metavar="N", help="measure full rows of such samples first")
    parser.add_argument(
        "--whole-tokens", type=_numbers, metavar="N,...", help="the tokens of such cases; default: --tokens"
    )
    parser.add_argument("--budget", type=int, default=65536)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warm-ups", type=int, default=WARM_UPS)
    parser.add_argument("--seconds", type=float, default=3600.0, help="no case starts later than this")
    parser.add_argument(
        "--settings",
        type=_names,
        default=SHARINGS,
        metavar="NAME,...",
        help="the first is what the others are compared with",
    )
    parser.add_argument("--recompute", default="none", choices=("none", "selective", "full"))
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--cuda-graphs", default="auto", choices=("auto", "never"))
    parser.add_argument(
        "--kept-logits",
        type=int,
        default=0,
        metavar="N",
        help="keep up to N * 2^30 logits of a row; 0: the GPU decides",
    )
    parser.add_argument("--whole-only", action="store_true", help="measure nothing but full rows")
    parser.add_argument("--all-logprobs", action="store_true", help="those of prompts, too, which no loss reads")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--models", type=Path, help="default: in memory if it has room, else the temporary folder")
    return parser.parse_args()


def _names(text: str) -> list[PrefixSharing]:
    return [name for name in SHARINGS if name in text.split(",")]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    main()
