"""python -m benchmarks.peers --output DIR [--python .venv/peers/bin/python] [--rounds 1]
       [--of headway,trl-1-thread,...] [--task short|long-tailed] [--gpus 0|1|2] [--go-on] [--unjudged] [key=value ...]

Headway and TRL train the task's model, from the same warmed-up weights. A task is a recipe, one for CPUs and one for
GPUs (`race.py`); `--recipe` names another one, and `key=value` are overrides of it for both. Responses of the task
`long-tailed` spread widely in their lengths: a few are many times as long as most. TRL races with each of its settings,
and the best of them counts. In every round each contestant runs once, in turn, and its median run counts. A warm-up
that has ended is not made again: give the same output to go on. With `--go-on` no run of that output is either, whose
figures are kept: so parts of a race may be commands of their own, also at once, each with its own CUDA_VISIBLE_DEVICES.
An output of another task or warm-up is refused, and with `--go-on` kept figures from other settings, other steps for
example.
An empty `--of` only warms up, and measures that model; `--warmed-up` begins with it in an output of its own, so that
runs of one contestant keep each its own model, and does not measure it again. `--unjudged` leaves the models' pass
rates to a later command that goes on.

With `--gpus 1` all generate with vLLM on the GPU where they train. Of two GPUs the engines of Headway, trl-async and
verl-async have the second one; the synchronous trainers train and generate on both. The page of this package says what
TRL and verl need. They may want different environments: give the same output to two commands.

Progress goes to standard error; the last line is one JSON object. Its "reward_of_headway_and_peer" has the mean rewards
of the last five steps, Headway's first, once both had trained as many samples, and once both had taken as many seconds.
The exit code is 1 if a run failed, 2 if nothing was started; targets that are missed stand in "met".
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import traceback
from functools import partial
from pathlib import Path

import msgspec

from benchmarks.gpus import gpu_names
from headway.broker.errors import ConfigError

from . import contestants, of_verl
from .comparison import TARGET, TARGETS, compared
from .figures import Figures
from .kept import BEFORE, Kept
from .of_headway import NAME
from .race import OWN, SETTINGS, SHORT, TASKS, Race, Task


def main() -> int:
    """Return the exit code: 1 if a run failed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started ends, too
    options = _parse()
    # One sampler for the engines of all contestants, and FlashInfer is not installed everywhere.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    task = Task(options.recipe) if options.recipe else TASKS[options.task]["cuda" if options.gpus else "cpu"]
    race = Race(
        recipe=task.recipe,
        overrides=(*task.overrides, *options.overrides),
        own=OWN.get((options.gpus, options.task), ()),
        output=str(options.output.absolute()),
        gpus=options.gpus,
        second_gpu=gpu_names(2)[1] if options.gpus == 2 else "",
    )
    race.load()  # refuses, before anything starts, what is no race
    kept = Kept(options.output, race, is_read=options.go_on)
    try:
        if options.warmed_up:
            contestants.copy_warm_up(race, options.warmed_up)
        runs = [f"{name}-{number}" for name in options.of for number in range(options.rounds)]
        judges_before = not (options.unjudged or options.warmed_up)
        kept.check([*runs, BEFORE] if judges_before else runs)
    except ConfigError as error:
        _tell(f"benchmarks.peers: {error}")
        return 2
    contestants.warm_up(race, options.timeout_s)
    judge = None if options.unjudged else partial(contestants.judged, race=race, timeout_s=options.timeout_s)
    rounds: dict[str, list[Figures]] = {name: [] for name in options.of}
    failed: dict[str, str] = {}
    for number in range(options.rounds):
        for name in options.of:
            _tell(f"{name}, load {os.getloadavg()[0]:.1f}")
            run = partial(contestants.run, name, race, options.python, options.timeout_s)
            try:
                rounds[name].append(kept.figures(f"{name}-{number}", run, judge))
            except Exception as error:  # noqa: BLE001 - whatever ended it, others race on
                failed[name] = str(error)[-200:]
                traceback.print_exc()
                continue
            _tell(json.dumps({name: msgspec.to_builtins(rounds[name][-1])}))
    before: float | None = None
    if judges_before:
        try:
            before = kept.before(lambda: contestants.pass_rate(race, race.model, options.timeout_s))
        except (ConfigError, subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            failed["before"] = str(error)[-200:]
    settings = {**contestants.TRL, **of_verl.SETTINGS}
    tried = {name: msgspec.to_builtins(settings[name]) for name in options.of if name in settings}
    about = {"recipe": race.recipe, "overrides": race.all_overrides, "own": race.own, "gpus": options.gpus}
    about["tried"] = tried
    target = TARGETS.get((options.gpus, options.task), TARGET)
    print(json.dumps({**about, **compared(rounds, before, target), "load": os.getloadavg()[0], "failed": failed}))
    return int(bool(failed))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the recipe, such as learner.steps=20")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--python", type=Path, default=Path(".venv/peers/bin/python"), help="an interpreter with TRL, or with verl"
    )
    parser.add_argument("--task", choices=TASKS, default=SHORT)
    parser.add_argument("--recipe", help="in the place of the task's")
    parser.add_argument(
        "--of",
        type=_names,
        metavar="NAME,...",
        help=f"of {', '.join(contestants.NAMES)}; default: {','.join(contestants.DEFAULT)}, and on CPUs"
        f" {contestants.BESIDE_ON_CPU}; of the long-tailed task on GPUs {','.join(contestants.LONG_TAILED_ON_GPUS)}",
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--go-on", action="store_true", help="with the figures that the output has")
    parser.add_argument(
        "--warmed-up", type=Path, metavar="OUTPUT", help="begin with that output's warmed-up model, measured there"
    )
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
    if not options.python.exists() and set(options.of) - {NAME}:
        parser.error(
            f"--python {options.python} does not exist; `make race` installs TRL into an environment of its own"
        )
    options.output.mkdir(parents=True, exist_ok=True)
    return options


def _names(text: str) -> tuple[str, ...]:
    asked = text.split(",") if text else []
    if unknown := set(asked) - set(contestants.NAMES):
        raise argparse.ArgumentTypeError(f"no {', '.join(sorted(unknown))}; there are {', '.join(contestants.NAMES)}")
    return tuple(asked)


def _tell(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
