"""The races: of each task one warm-up, whose model all runs begin with, then the runs, then their pass rates.

Each run has an output of its own: in one, runs of a contestant would overwrite each other's model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .measurement import SPARE_S, Machine, Measurement, module

WARM_UPS = ("warm_up_long-tailed", "warm_up_short")
WARM_UP_S, JUDGE_S = 400, 180
LIKELY_JUDGE_S = {"long-tailed": 85, "short": 30}
"""The seconds that one took with up to four on a GPU, of 512 and of 500 prompts."""
FIRST_RUN_S = 60
"""Seconds that a run may take longer where nothing is kept of an earlier one."""


@dataclass(frozen=True)
class _Run:
    """A contestant's run."""

    contestant: str
    likely_s: int
    """The seconds that it took on four H200, 2026-11-27; verl's are of a day before, with padded rows."""
    overrides: tuple[str, ...] = ()
    label: str = ""
    """Words that its name has behind the contestant's."""

    @property
    def limit_s(self) -> int:
        """The seconds after which it is ended; a slower host has them, too."""
        return self.likely_s * 7 // 4 + FIRST_RUN_S


HEADWAY = _Run("headway", 80)
HALF_AHEAD = _Run("headway", 90, ("staleness.ahead=0.5",), "-ahead-0.5")
TRL_IN_EIGHT = _Run("trl-all-threads-8-micro-batches", 240)
"""TRL's synchronous trainer has too little memory for fewer micro-batches of long-tailed samples."""
TRL_ASYNC = _Run("trl-async", 270)
TRL, TRL_ON_ONE = _Run("trl-all-threads", 160), _Run("trl-all-threads", 175)
VERL = _Run("verl-sync-packed", 420)


def long_tailed(machine: Machine) -> list[Measurement]:
    """Two GPUs: samples begun half a step ahead of the bound and a whole one, beside both trainers of TRL."""
    in_order = (TRL_IN_EIGHT, HALF_AHEAD, HEADWAY, HALF_AHEAD, TRL_IN_EIGHT, HEADWAY, TRL_ASYNC, HALF_AHEAD, HEADWAY)
    return _whole(machine, "long-tailed", 2, in_order, 15)


def short(machine: Machine) -> list[Measurement]:
    """Two GPUs."""
    return _whole(machine, "short", 2, (HEADWAY, TRL) * 3, 20)


def one_gpu(machine: Machine) -> list[Measurement]:
    """The short task on one GPU, from the same warm-up as on two."""
    return _whole(machine, "short", 1, (HEADWAY, TRL_ON_ONE, HEADWAY, TRL_ON_ONE, HEADWAY), 20)


def verl(machine: Machine) -> list[Measurement]:
    """The short task on two GPUs, with verl's own default of packed rows. Its steps are slow, so they are fewer."""
    return _whole(machine, "short", 2, (VERL,), 12)


def _whole(machine: Machine, task: str, gpus: int, runs: Sequence[_Run], steps: int) -> list[Measurement]:
    """Return the task's warm-up, the runs in their order, and what measures the models: several share one GPU."""
    warm_up = f"warm_up_{task}"
    place = ("--output", machine.output / warm_up, "--task", task, "--gpus", 1, "--go-on", "--of", "")
    model = f"model.path={machine.smollm2}"
    warmed = Measurement(
        warm_up, module("peers", *place, "--unjudged", model), WARM_UP_S, 85, quarters=2, after=machine.model_made
    )
    likely_s = LIKELY_JUDGE_S[task]
    made, judges = [warmed], [_judge(warm_up, module("peers", *place, model), likely_s)]
    for at, run in enumerate(runs):
        number = 1 + sum(earlier == run for earlier in runs[:at])
        name = f"race_{task}_{gpus}_{run.contestant}{run.label}_{number}"
        python = machine.verl if run == VERL else machine.trl
        begin = ("--output", machine.output / name, "--warmed-up", machine.output / warm_up, "--task", task)
        of = ("--gpus", gpus, "--python", python, "--go-on", "--of", run.contestant)
        last = ("--timeout-s", run.limit_s - SPARE_S, f"learner.steps={steps}", model, *run.overrides)
        command = module("peers", *begin, *of, "--unjudged", *last)
        made.append(Measurement(name, command, run.limit_s, run.likely_s, gpus=gpus, after=(warm_up,)))
        judges.append(_judge(name, module("peers", *begin, *of, *last), likely_s, sees=gpus))
    return [*made, *judges]


def _judge(name: str, command: tuple[str, ...], likely_s: int, sees: int = 1) -> Measurement:
    """Return what measures a model. It uses one GPU, but a race on two wants to see two."""
    return Measurement(f"{name}_judged", command, JUDGE_S, likely_s, quarters=1, sees=sees, after=(name,))
