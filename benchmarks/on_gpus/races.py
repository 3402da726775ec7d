"""The races: of each task one warm-up, whose model all runs begin with, then the runs, then their pass rates.

Each run has an output of its own: in one, runs of a contestant would overwrite each other's model.
"""

from collections.abc import Sequence

from .measurement import SPARE_S, Machine, Measurement, module

ROUNDS = 3
JUDGE_S = 150
WARM_UP_S = 150
VERL_S = 500
VERL = "verl"
"""verl's runs take turns: two at the same time would meet at one socket."""


def short(machine: Machine) -> list[Measurement]:
    """Two GPUs. Other settings of verl run once, to be compared with its packed rows."""
    runs = [
        *_runs(machine, "short", 2, {"verl-sync-packed": VERL_S}, 12),
        *_runs(machine, "short", 2, {"verl-sync": VERL_S, "verl-sync-packed-in-core": VERL_S}, 12, rounds=1),
        *_runs(machine, "short", 2, {"headway": 200, "trl-all-threads": 330}, 20),
    ]
    return _whole(machine, "short", runs)


def long_tailed(machine: Machine) -> list[Measurement]:
    """Two GPUs. TRL's synchronous trainer has too little memory for fewer micro-batches there."""
    limits = {"headway": 180, "trl-async": 400, "trl-all-threads-8-micro-batches": 340}
    runs = [
        *_runs(machine, "long-tailed", 2, limits, 15),
        *_runs(machine, "long-tailed", 2, {"verl-sync-packed": VERL_S}, 12, rounds=1),
    ]
    return _whole(machine, "long-tailed", runs)


def one_gpu(machine: Machine) -> list[Measurement]:
    """The short task on one GPU, from the same warm-up as on two."""
    return _whole(machine, "short", _runs(machine, "short", 1, {"headway": 220, "trl-all-threads": 270}, 20))


def _whole(machine: Machine, task: str, runs: Sequence[Measurement]) -> list[Measurement]:
    """Return the task's warm-up, the runs, and after each what measures its model: several share one GPU."""
    of = ("--of", "", "--unjudged", f"model.path={machine.smollm2}")
    place = ("--output", machine.output / f"race_{task}", "--task", task, "--gpus", 1)
    judges = [
        Measurement(
            f"{run.name}_judged",
            tuple(word for word in run.command if word != "--unjudged"),
            JUDGE_S,
            gpus=run.gpus,  # it uses the first, but a race on two wants to see two
            quarters=1,
            after=(run.name,),
        )
        for run in runs
    ]
    return [Measurement(f"race_{task}", module("peers", *place, *of), WARM_UP_S), *runs, *judges]


def _runs(
    machine: Machine, task: str, gpus: int, limits: dict[str, int], steps: int, rounds: int = ROUNDS
) -> list[Measurement]:
    """Return the runs of contestants, each with its limit in seconds, round by round."""
    runs = []
    for number in range(1, rounds + 1):
        for contestant, seconds in limits.items():
            name = f"race_{task}_{gpus}_{contestant}_{number}"
            python, turn = (machine.verl, VERL) if contestant.startswith(VERL) else (machine.trl, "")
            command = module(
                *("peers", "--output", machine.output / name, "--warmed-up", machine.output / f"race_{task}"),
                *("--task", task, "--gpus", gpus, "--python", python, "--go-on", "--unjudged"),
                *(
                    "--timeout-s",
                    seconds - SPARE_S,
                    "--of",
                    contestant,
                    f"learner.steps={steps}",
                    f"model.path={machine.smollm2}",
                ),
            )
            runs.append(Measurement(name, command, seconds, gpus=gpus, after=(f"race_{task}",), in_turn=turn))
    return runs
