"""The measurements of GPUs in RESULTS.md, on a machine with two of them or more, several side by side.

    python -m benchmarks.on_gpus --output DIR --smollm2 DIR [--gguf FILE] [--trl PYTHON] [--verl PYTHON]
        [--learner PYTHON] [--gpus 4] [--seconds 1650] [--dry-run] GROUP ...

    learn         GRPO of SmolLM2 on two GPUs; faults of weight transfers
    weights       weight transfers, engines' contracts
    agreement     of logprobs of engine and learner
    long-tailed   the long-tailed race on two GPUs
    short         the short race on two, one-gpu on one; verl has verl's run of it
    learner       the learner alone, with and without shared prompts, of four models
    starts        from the command to the first step: SmolLM2 on one GPU, an 8B shape with an adapter on two

SMOLLM2 is SmolLM2-135M-Instruct, made of `--gguf` unless it is there (see benchmarks.gguf_model). `--trl` and `--verl`
are the interpreters that `benchmarks.peers` speaks of, `--learner` one that has flash-attn-4.

A measurement starts, in the order of the groups that are given, once it has its GPUs and all before it has ended well;
none starts that would end after `--seconds`. Each leaves the last line that it prints in DIR/NAME.json, and its words
in NAME.log. One whose result is there is not made again: give the same output to go on.
"""

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from . import command
from .gpus import NO_MULTICAST, gpu_names
from .processes import Group

LOOK_S = 0.2
ENVIRONMENT = {**NO_MULTICAST, "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1"}
"""The environment of all measurements, unless it is set otherwise. FlashInfer is not installed everywhere."""
TABLES = {"qwen3-1.7b": 0, "qwen3-8b": 16, "qwen3-30b-a3b": 8, "qwen3-0.6b": 0}
"""Shapes of the learner alone, and how many of their layers fit a GPU; 0: all."""
ADAPTER = ("model.adapter={rank: 16, alpha: 32}", "model.dtype=bfloat16", "engine.dtype=bfloat16")
TRL_IN_EIGHT = "trl-all-threads-8-micro-batches"
"""TRL's synchronous trainer has too little memory for fewer micro-batches of long-tailed samples."""


@dataclass(frozen=True)
class Measurement:
    """One command of Python."""

    name: str
    command: tuple[str, ...]
    """The words after `python`."""
    seconds: int
    """It is ended after so many."""
    gpus: int = 1
    after: tuple[str, ...] = ()
    """Measurements that must have ended well."""
    python: Path | None = None
    """The interpreter; None: this one."""


def module(name: str, *arguments: object) -> tuple[str, ...]:
    """Return the words of `python -m NAME`."""
    return ("-m", name, *map(str, arguments))


def groups(options: argparse.Namespace) -> dict[str, list[Measurement]]:
    """Return the measurements by the names of their groups."""
    made = ("smollm2",) if options.gguf else ()
    model, output = f"model.path={options.smollm2}", options.output.absolute()
    on_two = (*("workers.count=1", "workers.devices=[1]", "weights.transport=nccl", "weights.staging=device"), model)
    run = (
        "run",
        "smollm2-reasoning-gym.yaml",
        "--json",
        "--overwrite",
        f"run.directory={output}",
        "run.name=grpo",
        *on_two,
    )
    tests = ["tests/weightsync/test_faults.py", "tests/weightsync/test_gpu.py", "tests/weightsync/test_hosts.py"]
    moe = ("--shape", "moe-2.4b")
    caches = ("--caches", output / "caches", "--timeout-s", 240, "--runs")
    eight = ("--shape", "qwen3-8b", "--recipe", "arithmetic-vllm.yaml", *ADAPTER, "engine.max_concurrent=256")
    on_gpu = ("learner.device=cuda", "engine.device=cuda")

    def sync(name: str, seconds: int, *arguments: object) -> Measurement:
        given = ("--output", output / name, "--limit-s", seconds - 10, *arguments)
        return Measurement(name, module("benchmarks.weight_sync", *given), seconds, gpus=2)

    def race(task: str, gpus: int, runs: Sequence[str], steps: int, python: Path, *more: str) -> list[Measurement]:
        """Return the task's warm-up, and runs that begin with it, each in an output of its own."""
        warm_up = f"warm_up_{task}"
        place = ("--task", task, "--gpus")
        first = module("benchmarks.peers", "--output", output / warm_up, *place, 1, "--of", "", model)
        found = [Measurement(warm_up, first, 400, after=made)]
        for number, contestant in enumerate(runs):
            name = f"race_{task}_{gpus}_{contestant}_{number}"
            own = ("--output", output / name, "--warmed-up", output / warm_up, *place, gpus, "--go-on")
            given = (*own, "--of", contestant, "--python", python, f"learner.steps={steps}", model, *more)
            found.append(Measurement(name, module("benchmarks.peers", *given), 700, gpus, (warm_up,)))
        return found

    rows = ("--whole", 8192, "--groups", "8,16", "--tokens", 65536, "--compile", "--steps", 2, "--warm-ups", 1)
    return {
        "learn": [
            Measurement("grpo", module("headway", *run), 400, 2, made),
            Measurement("faults", module("pytest", "-q", *tests, "-k", "gpu or nccl"), 300, 2),
        ],
        "weights": [
            sync("sync", 400, "--native", "--versions", 12),
            sync("sync_moe", 180, *moe, "--kv-policy", "keep"),
            sync("sync_ipc", 150, *moe, "--transport", "ipc", "--learner-gpus", 2, "--engine-gpus", 2),
            Measurement(
                "engines", module("pytest", "-q", "tests/rollout_workers/test_engine_contract.py", "-k", "vllm"), 300
            ),
        ],
        "agreement": [
            Measurement("agreement_moe", module("benchmarks.agreement", *moe, "--layers", 4), 300),
            Measurement("agreement", module("benchmarks.agreement", "--shape", "qwen3-0.6b"), 300),
        ],
        "long-tailed": race(
            "long-tailed",
            2,
            ["headway", TRL_IN_EIGHT, "headway", TRL_IN_EIGHT, "trl-async", "headway"],
            15,
            options.trl,
        ),
        "short": race("short", 2, ["headway", "trl-async", "trl-all-threads"] * 2, 20, options.trl),
        "one-gpu": race("short", 1, ["headway", "trl-all-threads"] * 2, 20, options.trl),
        "verl": race("short", 2, ["verl-sync-packed"], 12, options.verl),
        "learner": [
            Measurement(
                f"learner_{shape}",
                module("benchmarks.throughput", "--shape", shape, "--layers", layers, *rows, "--sharing", "never,auto"),
                400,
                python=options.learner,
            )
            for shape, layers in TABLES.items()
        ],
        "starts": [
            Measurement(
                "first_step_8b", module("benchmarks.first_step", "--gpus", 2, *caches, 3, *eight, *on_gpu), 780, 2
            ),
            Measurement(
                "first_step",
                module("benchmarks.first_step", "--gpus", 1, *caches, 4, "--recipe", run[1], model),
                980,
                1,
                made,
            ),
        ],
    }


class Schedule:
    """Gives GPUs to measurements, in their order, as they become free. Whatever runs when its block ends is ended."""

    def __init__(self, measurements: Sequence[Measurement], gpus: Sequence[str], output: Path) -> None:
        self._waiting, self._free, self._output = list(measurements), list(gpus), output
        self._running: list[tuple[Measurement, list[str], float, Group]] = []
        self.ended: dict[str, bool] = {}
        """Whether those that are over ended well, by name."""

    def run(self, seconds: float) -> None:
        """Run all that end within so many seconds; one that comes after another that failed is left out."""
        deadline = time.monotonic() + seconds
        try:
            while self._start(deadline) or self._running:
                self._collect()
                time.sleep(LOOK_S)
        finally:
            for *_, group in self._running:
                group.end()

    def _start(self, deadline: float) -> bool:
        """Start what can be started, in order, and return whether anything was."""
        has_begun = False
        for one in tuple(self._waiting):
            if result_of(self._output, one.name).exists():
                self.ended[one.name] = True
            elif any(self.ended.get(before) is False for before in one.after):
                self.ended[one.name] = False
            elif time.monotonic() + one.seconds > deadline or not all(map(self.ended.get, one.after)):
                continue
            elif len(self._free) < one.gpus:
                break
            else:
                self._begin(one, [self._free.pop(0) for _ in range(one.gpus)])
            self._waiting.remove(one)
            has_begun = True
        return has_begun

    def _begin(self, one: Measurement, gpus: list[str]) -> None:
        command.tell(f"{one.name} starts on {','.join(gpus)}")
        environment = {**ENVIRONMENT, **os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        words = (str(one.python or sys.executable), *one.command)
        out, log = (self._output / f"{one.name}.{end}" for end in ("out", "log"))
        with out.open("w") as output, log.open("w") as said:
            self._running.append((one, gpus, time.monotonic(), Group(words, environment, output=output, words=said)))

    def _collect(self) -> None:
        for entry in tuple(self._running):
            one, gpus, began, group = entry
            code, took_s = group.poll(), time.monotonic() - began
            if code is None and took_s < one.seconds:
                continue
            group.end()
            self._running.remove(entry)
            self._free = sorted([*self._free, *gpus])
            self.ended[one.name] = code == 0 and keep_result(self._output, one.name)
            how = "was ended at its limit" if code is None else f"ended with exit code {code}"
            command.tell(f"{one.name} {how} after {took_s:.0f} s")


def result_of(output: Path, name: str) -> Path:
    """Return the file of a measurement's result."""
    return output / f"{name}.json"


def keep_result(output: Path, name: str) -> bool:
    """Write the last line that it printed as its result, words as a string of JSON. False if it printed nothing."""
    lines = (output / f"{name}.out").read_text().splitlines()
    if lines:
        is_json = lines[-1].startswith(("{", "["))
        result_of(output, name).write_text((lines[-1] if is_json else json.dumps(lines[-1])) + "\n")
    return bool(lines)


def wanted(options: argparse.Namespace) -> list[Measurement]:
    """Return the measurements of the groups that are given, each once."""
    making = ("-m", "benchmarks.gguf_model", str(options.gguf), "--output", str(options.smollm2))
    table, first = groups(options), [Measurement("smollm2", making, 300, 0)] if options.gguf else []
    return list({one.name: one for one in (*first, *(one for name in options.group for one in table[name]))}.values())


def main() -> int:
    """Return the exit code: 1 if a measurement has no result."""
    options = parse()
    measurements = wanted(options)
    if options.dry_run:
        for one in measurements:
            print(f"{one.name} ({one.gpus} GPUs, {one.seconds} s): {one.python or 'python'} {shlex.join(one.command)}")
        return 0
    command.end_children_at_sigterm()
    options.output.mkdir(parents=True, exist_ok=True)
    schedule = Schedule(measurements, gpu_names(options.gpus), options.output)
    schedule.run(options.seconds)
    lacking = [one.name for one in measurements if not schedule.ended.get(one.name)]
    return command.finish({"without_result": lacking}, lacking)


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    here = Path(sys.executable)
    parser = command.parser(__doc__, "on_gpus")
    parser.add_argument("group", nargs="+", metavar="GROUP")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--smollm2", type=Path, required=True, help="SmolLM2-135M-Instruct")
    parser.add_argument("--gguf", type=Path, help="the file of which it is made first, unless it is there")
    parser.add_argument("--trl", type=Path, default=here, help="an interpreter with TRL; default: this")
    parser.add_argument("--verl", type=Path, default=here, help="one with verl; default: this")
    parser.add_argument("--learner", type=Path, help="one with flash-attn-4, for the learner alone; default: this")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="what would end later does not start")
    parser.add_argument("--dry-run", action="store_true", help="print every command")
    options = parser.parse_args(given)
    if unknown := set(options.group) - groups(options).keys():
        parser.error(f"no group {', '.join(sorted(unknown))}; there are {', '.join(groups(options))}")
    return options


if __name__ == "__main__":
    sys.exit(main())
