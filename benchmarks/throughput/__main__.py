"""python -m benchmarks.throughput --shape qwen3-1.7b [--cases fsdp,megatron,transformers-padded,transformers-packed]
    [--layers N] [--processes N] [--layout tensor=2,expert=2] [--recompute full] [--compile] [--steps 5] [--profile]
    [--micro-batch-tokens 16384] [--sequences 64] [--device cuda|cpu] [--models DIR] --output DIR

Tokens a second, MFU and peak memory of training steps. Every case runs in processes of its own; its figures, or its
error, are a line of OUTPUT/results.jsonl as soon as it ends, and figures that are there are not measured again.
transformers-padded stands for several numbers of rows (transformers-padded-4 for one), transformers-packed for every
attention that needs no flash-attn. Progress goes to standard error; the last line is one JSON object.
"""

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .names import BACKENDS, stands_for

if TYPE_CHECKING:
    from .case import Case

DEFAULT_CASES = "fsdp,transformers-padded,transformers-packed"
SUMMARY = ("tokens_per_s", "tokens_per_s_per_device", "mfu", "peak_memory_gib", "step_s", "padding", "leak")


def main() -> int:
    """Return the exit code: 1 if a case failed."""
    options = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the running case ends too, as at Ctrl-C
    from .results import Results

    results, cases = Results(options.output), _cases(options)
    model = str(_written_model(cases[0], options))
    lines = []
    for case in cases:
        _tell(f"{case.name}: {case.shape}, {case.processes} processes")
        function = "benchmarks.throughput.measuring:measure_ordered"
        lines.append(results.measured(case, function, case.processes, options.timeout_s, model=model))
        _tell(_words(lines[-1]))
    print(json.dumps({"results": str(results.path), **_summary(lines)}))
    return int(any("error" in line for line in lines))


def _written_model(case: "Case", options: argparse.Namespace) -> Path:
    """Return the directory of the weights, which is written if it is not there."""
    from . import checkpoint
    from .shapes import shape_of

    shape = shape_of(case.shape, case.layers)
    directory = checkpoint.folder(options.models, case.shape, shape)
    checkpoint.write_isolated(shape, directory, case.device, options.timeout_s)
    return directory


def _summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return short figures by case, and each of Headway's against the fastest of transformers'."""
    from .results import last_words

    measured = {line["case"]["name"]: line["result"] for line in lines if "result" in line}
    theirs = {name: one["tokens_per_s"] for name, one in measured.items() if name.startswith("transformers")}
    best = max(theirs, key=lambda name: theirs[name], default=None)
    return {
        "cases": {name: {key: one[key] for key in SUMMARY if key in one} for name, one in measured.items()},
        "failed": {line["case"]["name"]: last_words(line) for line in lines if "error" in line},
        "best_baseline": best,
        "over_best_baseline": {
            name: round(one["tokens_per_s"] / theirs[best], 3)
            for name, one in measured.items()
            if best and name not in theirs
        },
    }


def _words(line: dict[str, Any]) -> str:
    from .results import last_words

    name = line["case"]["name"]
    if "error" in line:
        return f"{name}: failed after {line['seconds']} s: {last_words(line)}"
    for kernel in line["result"].get("profile", {}).get("kernels", ()):
        _tell("{ms:10.2f} ms {share:7.2%} {calls:6d}x {name}".format(**kernel))
    figures = {key: value for key, value in line["result"].items() if key != "profile"}
    return f"{name}: {json.dumps(figures)}"


def _cases(options: argparse.Namespace) -> list["Case"]:
    """Return the cases that the names stand for, in order."""
    from headway.learner.config import ComputeConfig, LayoutConfig

    from .case import Case

    return [
        Case(
            name=name,
            shape=options.shape,
            layers=options.layers,
            processes=options.processes,
            layout=LayoutConfig(**options.layout) if name in BACKENDS else LayoutConfig(),
            compute=ComputeConfig(
                recompute=options.recompute,
                compile=options.compile and name != "megatron",
                offload_optimizer=options.offload and name == "fsdp",
            ),
            micro_batch_tokens=options.micro_batch_tokens,
            sequences=options.sequences,
            median_tokens=options.median_tokens,
            longest_tokens=options.longest_tokens,
            steps=options.steps,
            warm_up_steps=options.warm_up_steps,
            device=options.device,
            profile=options.profile,
        )
        for name in options.cases
    ]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.throughput",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--cases", type=_names, default=DEFAULT_CASES, metavar="NAME,...", help=f"default: {DEFAULT_CASES}"
    )
    parser.add_argument("--shape", default="qwen3-1.7b", help="qwen3-1.7b, -4b, -8b, -30b-a3b, toy or toy-moe")
    parser.add_argument("--layers", type=int, default=0, help="default: as many as the shape has")
    parser.add_argument("--processes", type=int, default=1, help="one a GPU")
    parser.add_argument("--layout", type=_sizes, default={}, metavar="KEY=N,...", help="of ours: see LayoutConfig")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--compile", action="store_true", help="torch.compile the layers, of all cases but megatron")
    parser.add_argument("--offload", action="store_true", help="fsdp: the optimizer's state in CPU memory")
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--sequences", type=int, default=64, help="a step, over all processes")
    parser.add_argument("--median-tokens", type=int, default=1024)
    parser.add_argument("--longest-tokens", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm-up-steps", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="two more steps, and where their time went")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="of one case")
    parser.add_argument("--models", type=Path, help="default: in memory if it has room, else the temporary folder")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    _check(parser, options)
    return options


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse names that stand for no case, before minutes go by."""
    from .shapes import SHAPES

    if options.shape not in SHAPES:
        parser.error(f"there is no shape {options.shape}; there are {', '.join(SHAPES)}")


def _names(text: str) -> list[str]:
    try:
        return stands_for(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _sizes(text: str) -> dict[str, int]:
    return {key: int(value) for key, _, value in (part.partition("=") for part in text.split(","))}


def _tell(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
