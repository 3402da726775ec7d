"""python -m benchmarks.chaos --seed 0 --minutes 3 [--without PROTECTION | all] [--against PROTECTION | all] [--json]

`--agents hosted` and `--agents outside` have agents play episodes of many turns. `--without` takes a protection out,
and strikes more often with the faults that it protects against. `--against` strikes in the same way and takes nothing
out. `all` is one trial after the other. The last line is a JSON object. The exit code is 1 unless every trial finishes
and its audit finds nothing; with `--without all` it is 1 unless every trial shows why its protection is needed. Faults
that did not hit anything, in up to three times the minutes, are named.
"""

import argparse
import logging
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import msgspec

from headway.broker.installation import is_installed

from .audit import MUST_BE_ZERO
from .journal import MUST_BE_ZERO as TURNS_MUST_BE_ZERO
from .outcome import Outcome
from .protections import PROTECTIONS
from .run import run_trial
from .trial import GROUPS_PER_MINUTE, Trial

COLUMNS = (*MUST_BE_ZERO, "tokens_regenerated")
OF_EPISODES = (
    *(*TURNS_MUST_BE_ZERO, "episodes_resumed", "attempts_per_episode", "most_attempts", "tokens_saved"),
    *("tokens_saved_share", "tool_calls", "tool_calls_saved", "tool_calls_saved_share"),
)


def main() -> int:
    """Return the exit code."""
    options = _parse()
    if not options.json:
        print(f"{'trial':32}{'samples':>8}{'kills':>6}{'effective':>10}", *(f"{name:>18}" for name in COLUMNS))
    logging.getLogger("headway.broker").setLevel(logging.ERROR)  # the benchmark's clients look on, or are hostile
    outcomes = list(_outcomes(options))
    is_one = len(outcomes) == 1
    print(msgspec.json.encode(outcomes[0] if is_one else {"trials": outcomes}).decode())
    if options.without == "all":
        return 0 if all(outcome.shows or PROTECTIONS[outcome.without].saves_work for outcome in outcomes) else 1
    return 0 if all(outcome.is_clean for outcome in outcomes) else 1


def _outcomes(options: argparse.Namespace) -> Iterator[Outcome]:
    for name in PROTECTIONS if "all" in (options.without, options.against) else [options.without or options.against]:
        outcome = _one(options, name)
        if not options.json:
            print(_row(outcome), flush=True)
        if outcome.episodes is not None and not options.json:
            told = (f"{name.replace('_', ' ')} {getattr(outcome.episodes, name)}" for name in OF_EPISODES)
            print(f"    agents: {', '.join(told)}", flush=True)
        if outcome.missing:
            print(f"Not shown by this trial: {', '.join(outcome.missing)}.", file=sys.stderr, flush=True)
        yield outcome


def _one(options: argparse.Namespace, name: str) -> Outcome:
    is_out, agents = bool(options.without), PROTECTIONS[name].agents if name else options.agents
    kept = options.keep and nullcontext(str(options.keep / f"{'without' if is_out else 'against'}-{name or 'nothing'}"))
    with kept or tempfile.TemporaryDirectory(prefix="headway-chaos-") as directory:
        return run_trial(
            Trial(
                seed=options.seed,
                minutes=options.minutes,
                groups_per_minute=options.groups_per_minute,
                rarely=options.rarely,
                agents=agents,
                sandbox="monty" if agents and is_installed("pydantic_monty") else "",
                directory=Path(directory),
                against=name,
                is_out=is_out,
            )
        )


def _row(outcome: Outcome) -> str:
    kills, effective = sum(outcome.kills.values()), sum(outcome.effective_kills.values())
    found = (f"{getattr(outcome, name):>18}" for name in COLUMNS)
    end = "" if outcome.finished else "  hung"
    name = f"without {outcome.without}" if outcome.without else f"against {outcome.against or 'everything'}"
    name += f" ({outcome.agents} agents)" if outcome.agents else ""
    return f"{name:32}{outcome.tasks:>8}{kills:>6}{effective:>10} {' '.join(found)}{end}"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=3.0, help="how long faults strike")
    parser.add_argument("--agents", default="", choices=["", "hosted", "outside"], help="who plays episodes of turns")
    parser.add_argument("--groups-per-minute", type=int, default=GROUPS_PER_MINUTE, help="fewer: a slower learner")
    parser.add_argument("--rarely", type=float, default=1.0, help="faults are so many times rarer")
    parser.add_argument("--without", default="", choices=["", *PROTECTIONS, "all"], help="take a protection out")
    parser.add_argument("--against", default="", choices=["", *PROTECTIONS, "all"], help="and its faults with it in")
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    parser.add_argument("--keep", type=Path, help="work in this directory and leave logs and checkpoints there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
