"""python -m benchmarks.chaos --seed 0 --minutes 3 [--without PROTECTION | all] [--json] [--keep DIRECTORY]

The last line is JSON: one object, or a list of them for `all`, which runs one trial after the other. The exit code of a
single trial is 1 unless nothing was lost, trained twice, over the bound or corrupt.
"""

import argparse
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import msgspec

from .protections import PROTECTIONS
from .run import Outcome, run_trial
from .trial import Trial

COLUMNS = ("lost", "trained_twice", "over_lag_bound", "corrupt", "off_lineage", "tokens_regenerated")


def main() -> int:
    """The exit code."""
    options = _parse()
    names = list(PROTECTIONS) if options.without == "all" else [options.without]
    if not options.json:
        print(f"{'without':24}{'samples':>8}{'kills':>6}{'effective':>10}", *(f"{name:>18}" for name in COLUMNS))
    outcomes = []
    for name in names:
        outcomes.append(_one(options, name))
        if not options.json:
            print(_row(outcomes[-1]), flush=True)
    print(msgspec.json.encode(outcomes if options.without == "all" else outcomes[0]).decode())
    return 0 if options.without == "all" or outcomes[0].is_clean else 1


def _one(options: argparse.Namespace, without: str) -> Outcome:
    kept = options.keep and nullcontext(str(options.keep / (without or "nothing")))
    with kept or tempfile.TemporaryDirectory(prefix="headway-chaos-") as directory:
        trial = Trial(seed=options.seed, minutes=options.minutes, directory=Path(directory), without=without)
        return run_trial(trial)


def _row(outcome: Outcome) -> str:
    kills, effective = sum(outcome.kills.values()), sum(outcome.effective_kills.values())
    found = (f"{getattr(outcome, name):>18}" for name in COLUMNS)
    end = "" if outcome.finished else "  hung"
    return f"{outcome.without or 'nothing':24}{outcome.tasks:>8}{kills:>6}{effective:>10} {' '.join(found)}{end}"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=3.0, help="how long faults strike")
    parser.add_argument("--without", default="", choices=["", *PROTECTIONS, "all"], help="take a protection out")
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    parser.add_argument("--keep", type=Path, help="work in this directory and leave logs and checkpoints there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
