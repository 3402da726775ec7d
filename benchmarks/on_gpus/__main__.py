"""The command line; the page of this package describes it."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpus import gpu_names

from . import __doc__ as page
from .measurement import Machine, Measurement, closed
from .plan import Plan
from .schedule import Schedule, result_of
from .table import groups, model

SIZES = (2, 4)
"""The numbers of GPUs for which there is a table."""


def main() -> int:
    """Return the exit code: 1 if a measurement has no result, 2 if none was begun, as `--learner` lacks its kernels."""
    options = _parse()
    machine = Machine(
        gpus=tuple(gpu_names(options.gpus)),
        output=options.output.absolute(),
        smollm2=options.smollm2.absolute(),
        trl=options.trl,
        verl=options.verl,
        gguf=options.gguf and options.gguf.absolute(),
        learner=options.learner,
    )
    table = groups(machine)
    known = [*model(machine), *(one for of_group in table.values() for one in of_group)]
    wanted = closed([one for name in options.group for one in table[name]], known)
    if options.dry_run:
        plan = Plan(wanted, machine)
        plan.run(options.seconds)
        print("\n".join(plan.told()))
        return 0
    if options.learner and "learner" in options.group and (error := _lacks_its_kernels(options.learner)):
        print(f"--learner {options.learner} cannot import flash_attn.cute: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what is running ends, too
    machine.output.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    schedule = Schedule(
        wanted, machine, lambda words: print(f"{time.monotonic() - began:6.0f} {words}", file=sys.stderr, flush=True)
    )
    schedule.run(options.seconds)
    lacking = [one.name for one in wanted if not schedule.ended.get(one.name)]
    print(json.dumps({"without_result": lacking, "samples_per_s": _speeds(machine.output, wanted)}))
    return int(bool(lacking))


def _lacks_its_kernels(python: Path) -> str:
    """Return why an interpreter cannot import flash-attn-4, without which its measurements would be of torch's kernel;
    "" if it can."""
    try:
        found = subprocess.run((python, "-c", "import flash_attn.cute"), capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    return (found.stderr.strip().splitlines() or [f"exit code {found.returncode}"])[-1] if found.returncode else ""


def _speeds(output: Path, wanted: Sequence[Measurement]) -> dict[str, dict[str, Any]]:
    """Return the races' samples per second and pass rates, by the names of runs without their numbers."""
    found: dict[str, dict[str, list[float]]] = {}
    for one in wanted:
        if one.name.startswith("race_") and result_of(output, one.name).exists():
            run = one.name.removesuffix("_judged")
            of_run = json.loads(result_of(output, one.name).read_text())
            (contestant,) = of_run["samples_per_s"]
            lists = found.setdefault(run.rpartition("_")[0], {"runs": [], "pass_rates": []})
            if run == one.name:
                lists["runs"] += of_run["samples_per_s"][contestant]
            else:
                lists["pass_rates"].append(of_run[contestant]["pass_rate"])
    return {name: {"median": median(lists["runs"]), **lists} for name, lists in found.items() if lists["runs"]}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.on_gpus", description=page, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    nowhere = Machine((), Path(), Path(), Path(), Path())
    parser.add_argument("group", nargs="+", choices=list(groups(nowhere)), metavar="GROUP")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--smollm2", type=Path, required=True, help="SmolLM2-135M-Instruct")
    parser.add_argument("--gguf", type=Path, help="the file of which it is made first, unless it is there")
    parser.add_argument("--trl", type=Path, default=Path(sys.executable), help="an interpreter with TRL; default: this")
    parser.add_argument("--verl", type=Path, default=Path(sys.executable), help="one with verl; default: this")
    parser.add_argument("--learner", type=Path, help="one with flash-attn-4, for the learner alone; default: this")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    count = min(SIZES) if visible and len(visible.split(",")) < max(SIZES) else max(SIZES)
    parser.add_argument("--gpus", type=int, choices=SIZES, default=count, help="default: 4, or 2 if fewer are visible")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="what runs then is ended")
    parser.add_argument("--dry-run", action="store_true", help="print every command, and when it is likely to run")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
