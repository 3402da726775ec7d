"""python -m benchmarks.staleness [--seeds N] [--lags 0,1,4,8,16] [--only NAME ...] [--processes P] [--out DIR]

Runs are appended to OUT/runs.jsonl as they end, and those that are there already are not repeated: a study that was
stopped goes on, and one with more seeds, lags or names adds to it. The last line is one JSON object.
"""

import argparse
import os
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

from benchmarks import command

from .compositions import COMPOSITIONS
from .report import summarize, write_table
from .study import Study
from .trial import QUICK, Settings

LAGS = (0, 1, 4, 8, 16)


def main() -> int:
    """Return the exit code: 1 if a run failed."""
    options = _parse()
    command.end_children_at_sigterm()
    settings = QUICK if options.quick else Settings(steps=options.steps, learning_rate=options.learning_rate)
    out = options.out or (None if options.quick else Path("runs/staleness"))
    with nullcontext(str(out)) if out else tempfile.TemporaryDirectory(prefix="headway-staleness-") as directory:
        study = Study(Path(directory), settings, options.only, options.lags, range(options.seeds))
        failed = study.run(options.processes)
        outcomes = study.outcomes()
        summary = summarize(outcomes)
        if outcomes:
            write_table(summary, settings, study.directory / "table.md")
            command.tell((study.directory / "table.md").read_text())
        found = {"directory": directory, "runs": len(outcomes), "failed": failed, "compositions": summary}
        return command.finish(found, failed)


def _parse() -> argparse.Namespace:
    parser = command.parser(__doc__, "staleness")
    parser.add_argument("--seeds", type=int, default=3, help="so many, from 0")
    parser.add_argument("--lags", type=command.numbers, metavar="L,L...", help=f"default: {','.join(map(str, LAGS))}")
    parser.add_argument("--only", nargs="+", action="extend", metavar="NAME", help=", ".join(COMPOSITIONS))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="default: one a core")
    parser.add_argument("--out", type=Path, help="default: runs/staleness")
    parser.add_argument("--quick", action="store_true", help="does it run? The figures mean nothing")
    options = parser.parse_args()
    if unknown := sorted(set(options.only or ()) - COMPOSITIONS.keys()):
        parser.error(f"no composition {', '.join(unknown)}; there are {', '.join(COMPOSITIONS)}")
    if options.quick:
        options.seeds = 1
        options.only = options.only or ["grpo/none", "grpo/tis"]
        options.lags = options.lags or (0, 2)
    options.only = options.only or list(COMPOSITIONS)
    options.lags = options.lags or LAGS
    return options


if __name__ == "__main__":
    sys.exit(main())
