"""python -m benchmarks.learns --model DIR --output DIR [--parts sft,grpo,gspo,control] [--gpus 1] [key=value ...]
   python -m benchmarks.learns --recipe arithmetic-megatron.yaml --output DIR --gpus 4 --learner-gpus 2 [key=value ...]
   python -m benchmarks.learns --model DIR --output DIR --gpus 2 --parts sft,sglang,mixed --sglang "[NAME=VALUE] PYTHON"

A model that never solves two reasoning-gym tasks learns from worked examples how, then by asynchronous GRPO and GSPO,
while a control with learning rate 0 stays where it was. Two further parts are GRPO with workers that are started apart:
`sglang` has SGLang's, `mixed` a pool of the recipe's engine and one of SGLang's. `key=value` are overrides of the
recipe, for all parts; with "model.adapter={rank: 16, alpha: 32, stages: [rl]}" runs train an adapter and send it alone.
A part that has ended is not run again: give the same output to go on. Progress goes to standard error; the last line is
one JSON object. The exit code is 1 if a part failed; targets that are missed stand in "met".
"""

import argparse
import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .apart import APART, Pools
from .parts import KNOWN, PARTS, SFT, Study

RECIPE = "smollm2-reasoning-gym.yaml"


def main() -> int:
    """Return the exit code: 1 if a part failed."""
    options = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the running part ends too, as at Ctrl-C
    study = Study(
        recipe=options.recipe,
        model=options.model and options.model.absolute(),
        output=options.output.absolute(),
        gpus=options.gpus,
        learner_gpus=options.learner_gpus,
        overrides=options.overrides,
        control_steps=options.control_steps,
        timeout_s=options.timeout_s,
        pools=Pools(
            sglang=shlex.split(options.sglang),
            of_sglang=shlex.split(options.of_sglang),
            of_own=shlex.split(options.of_own),
        ),
    )
    from . import figures

    found: dict[str, Any] = {}
    failed = {}
    for part in options.parts:
        _tell(f"{time.strftime('%H:%M:%S')} {part}")
        try:
            study.run(part)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            failed[part] = (
                f"exit code {error.returncode}" if hasattr(error, "returncode") else f"{error.timeout:g} s up"
            )
            if part == SFT:
                break
            continue
        directory = study.directory(part)
        of = figures.of_sft if part == SFT else figures.of_apart if part in APART else figures.of_run
        found[part] = of(directory)
        _tell(json.dumps({part: found[part]}))
    print(json.dumps({**found, **figures.compared(found), "failed": failed}))
    return int(bool(failed))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learns", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the recipe, such as learner.steps=40")
    parser.add_argument("--model", type=Path, help="see benchmarks.learns.model; default: the recipe's")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--parts", type=_parts, default=PARTS, metavar="PART,...", help=f"default: {','.join(PARTS)}")
    parser.add_argument("--gpus", type=int, default=1, help="0: CPUs; 1: shared; more: workers on all but the first")
    parser.add_argument("--learner-gpus", type=int, default=1, help="where workers have others")
    parser.add_argument("--recipe", default=RECIPE)
    parser.add_argument("--control-steps", type=int, default=15)
    parser.add_argument("--timeout-s", type=float, default=540.0, help="of one part")
    parser.add_argument(
        "--sglang", default=sys.executable, metavar="COMMAND", help="SGLang's Python, as `env` takes it"
    )
    parser.add_argument("--of-sglang", default="", metavar="WORDS", help="overrides of SGLang's workers alone")
    parser.add_argument("--of-own", default="", metavar="WORDS", help="overrides of the other workers beside them")
    options = parser.parse_intermixed_args()
    options.output.mkdir(parents=True, exist_ok=True)
    return options


def _parts(text: str) -> tuple[str, ...]:
    """Return the parts in the order in which they need each other."""
    asked = text.split(",")
    if unknown := set(asked) - set(KNOWN):
        raise argparse.ArgumentTypeError(f"no part {', '.join(sorted(unknown))}; there are {', '.join(KNOWN)}")
    return tuple(part for part in KNOWN if part in asked)


def _tell(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
