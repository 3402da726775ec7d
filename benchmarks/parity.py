"""A comparison of every layout of every backend with plain transformers, from loss to optimizer moments.

    python -m benchmarks.parity [--backend fsdp,megatron] [--model NAME,...] [--processes 1,2,4] [--out DIR]
    python -m benchmarks.parity --device cuda --dtype bfloat16 --shape small --processes 1,2

With `--dtype bfloat16` every layout is compared with one process of the same backend, and may lie twice as far from it
as bfloat16 takes that one process from fp32. Findings are kept in OUT, a file for every case, and cases that are there
already are not run again: a comparison that was stopped goes on. The last line is one JSON object.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import command

if TYPE_CHECKING:
    from tests.learner.parity.finding import Finding


def main() -> int:
    """Return the exit code: 1 if a layout fails or computes something else; refused layouts are only named."""
    options = _parse()
    out = options.out or Path("runs/parity") / f"{options.device}-{options.dtype}-{options.shape}"
    findings = _compare(options, out)
    summary = _summary(findings)
    return command.finish({"directory": str(out), **summary}, summary["failed"])


def _compare(options: argparse.Namespace, out: Path) -> "list[Finding]":
    from transformers.utils.logging import disable_progress_bar

    from tests.learner.parity.cases import Setting, every_case
    from tests.learner.parity.comparison import Comparison

    disable_progress_bar()
    out.mkdir(parents=True, exist_ok=True)
    cases = every_case(options.backend, options.model, options.processes, options.shape)
    comparison = Comparison(out, Setting(device=options.device, dtype=options.dtype, shape=options.shape))
    findings = []
    for finding in comparison.run(cases):
        findings.append(finding)
        words = "; ".join(problem.strip() for problem in finding.problems) or "equal"
        command.tell(f"{len(findings)}/{len(cases)} {finding.name} {finding.seconds} s: {words}")
    return findings


def _summary(findings: "Sequence[Finding]") -> dict[str, Any]:
    refused = [finding.name for finding in findings if finding.is_refused]
    return {
        "cases": len(findings),
        "equal": sum(not finding.problems for finding in findings),
        "refused": refused,
        "failed": {f.name: f.problems for f in findings if f.problems and not f.is_refused},
        "largest": _largest(findings),
        "deviations": {finding.name: _rounded(finding.deviations) for finding in findings},
    }


def _largest(findings: "Sequence[Finding]") -> dict[str, float]:
    """Return the largest deviation of every kind, over all cases."""
    kinds = {kind for finding in findings for kind in finding.deviations}
    return _rounded({kind: max(f.deviations.get(kind, 0.0) for f in findings) for kind in sorted(kinds)})


def _rounded(deviations: dict[str, float]) -> dict[str, float]:
    return {kind: float(f"{apart:.2g}") for kind, apart in deviations.items()}


def _parse() -> argparse.Namespace:
    parser = command.parser(__doc__, "parity")
    parser.add_argument("--backend", type=command.names, default=["fsdp", "megatron"], metavar="B,...")
    parser.add_argument("--model", type=command.names, default=["qwen3", "llama", "qwen3_moe"], metavar="NAME,...")
    parser.add_argument("--processes", type=command.numbers, default=[1, 2, 4], metavar="N,...")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--shape", choices=["toy", "small"], default="toy", help="widths of 32 or 512")
    parser.add_argument("--out", type=Path, help="default: runs/parity/DEVICE-DTYPE-SHAPE")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
