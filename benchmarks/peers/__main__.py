"""python -m benchmarks.peers --output DIR [--python .venv/peers/bin/python] [--rounds 1]
       [--of headway,trl-1-thread,...] [--task short|long-tailed|agent] [--gpus 0|1|2] [--go-on] [--unjudged]
       [key=value ...]

Headway and its peers train the task's model, from the same warmed-up weights. `key=value` are overrides of the task's
recipe for all. In every round each contestant runs once, in turn, and its median run counts; of a peer with several
settings the fastest counts. A warm-up that has ended is not made again: give the same output to go on. With `--go-on`
no run of that output is either, whose figures are kept; figures of other settings are refused. An empty `--of` only
warms up; `--warmed-up` begins with the model of another output. `--unjudged` leaves the models' pass rates to a later
command that goes on.

With `--gpus 1` all generate with vLLM on the GPU where they train. Of two GPUs the engines of Headway and trl-async
have the second one; the synchronous trainers train and generate on both. The page of this package says what TRL and
verl need. Progress goes to standard error; the last line is one JSON object. The exit code is 1 if a run failed, 2 if
nothing was started; targets that are missed stand in "met".
"""

import argparse
import json
import os
import shutil
import sys
import traceback
from functools import partial
from pathlib import Path

import msgspec

from benchmarks import command
from benchmarks.gpus import gpu_names
from headway.broker.errors import ConfigError

from . import contestants
from .figures import TARGET, TARGETS, Figures, compared
from .race import HEADWAY, OWN, SETTINGS, SHORT, TASKS, Race


def main() -> int:
    """Return the exit code."""
    command.end_children_at_sigterm()
    options = _parse()
    # One sampler for the engines of all contestants.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    task = TASKS[options.task]["cuda" if options.gpus else "cpu"]
    race = Race(
        recipe=task.recipe,
        overrides=(*task.overrides, *options.overrides),
        own=OWN.get((options.gpus, options.task), ()),
        output=str(options.output.absolute()),
        gpus=options.gpus,
        second_gpu=gpu_names(2)[1] if options.gpus == 2 else "",
    )
    race.load()  # refuses, before anything starts, what is no race
    try:
        if options.warmed_up:
            contestants.copy_warm_up(race, options.warmed_up)
        runs = [f"{name}-{number}" for name in options.of for number in range(options.rounds)]
        contestants.check(race, runs if options.go_on else ())
    except ConfigError as error:
        command.tell(f"benchmarks.peers: {error}")
        return 2
    contestants.warm_up(race, options.timeout_s)
    rounds, failed = _rounds(options, race)
    about = {"recipe": race.recipe, "overrides": race.all_overrides, "own": race.own, "gpus": options.gpus}
    target = TARGETS.get((options.gpus, options.task), TARGET)
    found = {**about, **compared(rounds, target), "load": os.getloadavg()[0], "failed": failed}
    return command.finish(found, failed)


def _rounds(options: argparse.Namespace, race: Race) -> tuple[dict[str, list[Figures]], dict[str, str]]:
    """Return the figures of each contestant's runs, and the last words of those that failed."""
    judge = None if options.unjudged else partial(contestants.judged, race=race, timeout_s=options.timeout_s)
    rounds: dict[str, list[Figures]] = {name: [] for name in options.of}
    failed: dict[str, str] = {}
    for number in range(options.rounds):
        for name in options.of:
            command.tell(f"{name}, load {os.getloadavg()[0]:.1f}")
            run = partial(contestants.run, name, race, options.python, options.timeout_s)
            try:
                found = contestants.kept(race, f"{name}-{number}", run, judge, is_read=options.go_on)
            except Exception as error:  # noqa: BLE001 - whatever ended it, others race on
                failed[name] = str(error)[-200:]
                traceback.print_exc()
                continue
            rounds[name].append(found)
            command.tell(json.dumps({name: msgspec.to_builtins(found)}))
    return rounds, failed


def _parse() -> argparse.Namespace:
    parser = command.parser(__doc__, "peers")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the recipe, such as learner.steps=20")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--python", type=Path, default=Path(".venv/peers/bin/python"), help="an interpreter with TRL, or with verl"
    )
    parser.add_argument("--task", choices=TASKS, default=SHORT)
    defaults = f"default: {','.join(contestants.DEFAULT)}, and on CPUs {contestants.BESIDE_ON_CPU}"
    parser.add_argument("--of", type=_names, metavar="NAME,...", help=f"of {', '.join(contestants.NAMES)}; {defaults}")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--go-on", action="store_true", help="with the figures that the output has")
    parser.add_argument("--warmed-up", type=Path, metavar="OUTPUT", help="begin with that output's warmed-up model")
    parser.add_argument("--unjudged", action="store_true", help="without the pass rates of models")
    parser.add_argument("--gpus", type=int, choices=SETTINGS, default=0, help="0: CPUs")
    parser.add_argument("--timeout-s", type=float, default=900.0, help="of one command")
    options = parser.parse_intermixed_args()
    if options.of is None:
        options.of = contestants.default(options.gpus, options.task)
    if lacking := [why for name in options.of if (why := contestants.lacking(name, options.gpus))]:
        parser.error("; ".join(lacking))
    if options.unjudged and options.rounds > 1:
        parser.error("--unjudged: of several rounds only the last one's model stays")
    options.python = Path(shutil.which(str(options.python)) or options.python).absolute()  # verl has another directory
    if not options.python.exists() and set(options.of) - {HEADWAY}:
        parser.error(
            f"--python {options.python} does not exist; `make race` installs TRL into an environment of its own"
        )
    options.output.mkdir(parents=True, exist_ok=True)
    return options


def _names(text: str) -> list[str]:
    asked = command.names(text)
    if unknown := set(asked) - set(contestants.NAMES):
        raise argparse.ArgumentTypeError(f"no {', '.join(sorted(unknown))}; there are {', '.join(contestants.NAMES)}")
    return asked


if __name__ == "__main__":
    sys.exit(main())
