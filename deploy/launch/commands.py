"""The exact commands of a run's roles: a launcher starts them, and `--dry-run` shows them."""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from headway.broker.connection.address import PASSWORD_FILE, with_whole_paths
from headway.broker.errors import ConfigError
from headway.deploy.recipe.pools import LEARNER, MAIN, POOL, SCORER, WORKER, pools_of, scorers_of
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.recipe.trust import passed_on, passed_on_to_scorers
from headway.deploy.run.run_directory import CONFIG
from headway.deploy.run.stage_output import Planned
from headway.learner.experience.log import Rewind
from headway.rollout_workers.config import EngineConfig, ScorersConfig
from headway.rollout_workers.engines import abilities_of, gpus_of
from headway.rollout_workers.scorers.runtimes import gpus_of as gpus_of_runtime

from .base import BROKER, PREWARM, Command, Resources
from .engine_preload import ENGINE

PYTHON = (sys.executable, "-m", "headway", "--debug")


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """Where a run begins."""

    resume: bool = False
    """Go on from the run's last checkpoint."""
    overwrite: bool = False
    """Lose what the run's directory and the server hold of it."""
    is_forced: bool = False
    """With `overwrite`: even if the run is in use."""
    rewind: Rewind | None = None
    """With `resume`: an earlier checkpoint to go back to."""

    def options(self) -> tuple[str, ...]:
        """Return the options of `headway run` that say the same."""
        given = {"--resume": self.resume, "--overwrite": self.overwrite, "--force": self.is_forced}
        options = [option for option, is_given in given.items() if is_given]
        if self.rewind is not None:
            options += ["--rewind-to", f"{self.rewind.step}", *(["--regenerate"] if self.rewind.regenerate else [])]
        return tuple(options)


def prepare_command(recipe_name: str, overrides: Sequence[str], options: Sequence[str]) -> Command:
    """Return the command that makes the run's directory. `headway run` does that in its own process."""
    return Command(name="prepare", argv=(*_plainly(), "prepare", recipe_name, *overrides, *options), log=None)


def server_command(directory: Path) -> Command:
    """Return the command that serves as `headway run`'s server does: with the same data, passwords and address."""
    return Command(name="server", argv=(*_plainly(), "broker", "--port", "0", "--directory", str(directory)), log=None)


def stage_command(recipe: Recipe, directory: Path, stage: Planned) -> Command:
    """Return the command for a stage without workers, such as supervised training, in a prepared directory."""
    output = directory / stage.directory.relative_to(recipe.run_directory)
    which = ("--stage", f"{stage.number}") if stage.number else ()
    return sft_command(recipe, (str(directory / CONFIG), "--output", str(output), *which), stage.number)


def sft_command(recipe: Recipe, arguments: Sequence[str], number: int) -> Command:
    """Return `headway sft` for stage `number` in this terminal, under torchrun if the learner has several ranks."""
    return Command(
        name=f"Stage {recipe.plan[number].name}",
        argv=(*ranks(recipe.learner.processes, _plainly()), "sft", *arguments),
        log=None,
        resources=learner_resources(recipe),
        relay=recipe.learner.processes > 1,
        role=LEARNER,
    )


def _plainly() -> tuple[str, ...]:
    """Return the options of a child in this terminal: it prints tracebacks only if the user asks for them."""
    return PYTHON if "--debug" in sys.argv else PYTHON[:-1]


def learner_command(
    recipe: Recipe, directory: Path, url: str, start: RunStart, *, exit_notice: Path | None = None
) -> Command:
    """Return the learner's command, under torchrun if it has several ranks. The learner starts from the model that the
    last stage before it left, if there is one."""
    return Command(
        name="learner",
        argv=(*ranks(recipe.learner.processes), *learner_arguments(directory, start)),
        log=directory / "logs" / "learner.log",
        environment=connection(url, recipe.run.name),
        resources=learner_resources(recipe),
        relay=recipe.learner.processes > 1,
        exit_notice=exit_notice,
        role=LEARNER,
    )


def learner_arguments(directory: Path, start: RunStart) -> tuple[str, ...]:
    """Return the arguments of `headway learner` in a prepared directory."""
    options = replace(start, overwrite=False, is_forced=False).options()
    return ("learner", str(directory / CONFIG), "--prepared", *options)


def ranks(processes: int, command: tuple[str, ...] = PYTHON) -> tuple[str, ...]:
    """Return `python -m headway` as so many ranks."""
    if processes == 1:
        return command
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes))
    return (sys.executable, *torchrun, *command[1:])


@dataclass(frozen=True, kw_only=True)
class WorkerCommand:
    """Returns the command of worker 0, 1, 2, ... of a pool. Each worker has an empty directory of its own. Workers
    share only the broker, and GPUs if there are fewer `devices` than workers."""

    url: str
    run: str
    arguments: Sequence[str]
    """The arguments of `headway worker`."""
    private: Path
    """The parent of the workers' own directories."""
    logs: Path
    threads: int
    devices: Sequence[str] = ()
    """CUDA_VISIBLE_DEVICES of one worker after the other; none: every worker sees all GPUs."""
    gpus: int | None = None
    """GPUs that each worker takes, if known."""
    prefix: str = "worker"
    """Workers are called PREFIX-NUMBER."""
    pool: str = MAIN
    """The pool's name."""
    ahead: Path | None = None
    """The run's recipe, if a worker may open its engine beside the learner that loads; see `PREWARM`."""
    engine: str = ""
    """The kind of the workers' engine, if known; see `ENGINE`."""
    role: ClassVar[str] = WORKER
    """The command of `headway` that runs one."""

    def own_arguments(self) -> Sequence[str]:
        """Return the arguments besides the name."""
        return self.arguments

    def __call__(self, number: int) -> Command:
        name = f"{self.prefix}-{number}"
        devices = self.devices[number % len(self.devices)] if self.devices else None
        known = {PREWARM: str(self.ahead or ""), ENGINE: self.engine}
        return Command(
            name=name,
            argv=(*PYTHON, self.role, "--name", name, *self.own_arguments()),
            log=self.logs / f"{name}.log",
            cwd=self.private / name,
            environment=connection(self.url, self.run) | {name: value for name, value in known.items() if value},
            resources=Resources(threads=self.threads, gpus=self.gpus, devices=devices),
            exit_notice=self.private / f"{name}.exit_notice",
            role=self.role,
            pool=self.pool,
            number=number,
        )


@dataclass(frozen=True, kw_only=True)
class ScorerCommand(WorkerCommand):
    """Returns the command of process 0, 1, 2, ... of a scorer, as `WorkerCommand` does."""

    scorer: str
    """The scorer's name; empty: the run's only one."""
    role: ClassVar[str] = SCORER

    def own_arguments(self) -> Sequence[str]:
        return ("--scorer", self.scorer, *self.arguments) if self.scorer else self.arguments


def connection(url: str, run: str) -> dict[str, str]:
    """Return a child's environment that names broker and run, in any directory. Arguments would show a password to
    every user, and torchrun takes --run for its own."""
    file = os.environ.get(PASSWORD_FILE)
    place = {PASSWORD_FILE: os.path.abspath(os.path.expanduser(file))} if file else {}
    return {BROKER: with_whole_paths(url), "HEADWAY_RUN": run, **place}


def learner_resources(recipe: Recipe) -> Resources:
    """Return the learner's resources: each rank has a GPU, unless the learner trains on a CPU."""
    learner = recipe.learner
    gpus = 0 if learner.device == "cpu" else learner.processes
    return Resources(processes=learner.processes, threads=learner.threads, gpus=gpus)


def scorer_gpus(scorers: ScorersConfig) -> int:
    """Return the GPUs of one process of a scorer."""
    return 0 if scorers.device == "cpu" else gpus_of_runtime(scorers.engine)


def engine_gpus(engine: EngineConfig) -> int:
    """Return the GPUs of one worker."""
    return 0 if abilities_of(engine).follows_device and engine.device == "cpu" else gpus_of(engine)


@dataclass(frozen=True, kw_only=True)
class ProcessGroup:
    """The equal processes of a recipe that a launcher places: those of a pool of workers, or of a scorer."""

    role: str
    """WORKER or SCORER."""
    name: str
    """The name of the pool, or of the scorer."""
    count: int
    arguments: Sequence[str]
    """The overrides that each process gets."""
    resources: Resources
    """What each process takes."""
    recipe: Recipe
    """The recipe with the engine of the pool."""

    @property
    def pool(self) -> str:
        """The name of the pool under which a supervisor has it."""
        return f"{POOL}{self.name}" if self.role == SCORER else self.name


def process_groups(recipe: Recipe) -> Iterator[ProcessGroup]:
    """Yield the pools of workers, the main one first, and then the scorers."""
    others = [(pool.name, pool.count, pool.recipe, pool.arguments()) for pool in pools_of(recipe)]
    for name, count, own, arguments in ((MAIN, recipe.workers.count, recipe, passed_on(recipe)), *others):
        resources = Resources(threads=own.engine.threads, gpus=engine_gpus(own.engine))
        yield ProcessGroup(role=WORKER, name=name, count=count, arguments=arguments, resources=resources, recipe=own)
    for scorer in scorers_of(recipe):
        yield ProcessGroup(
            role=SCORER,
            name=scorer.name,
            count=recipe.scorers.count,
            arguments=passed_on_to_scorers(recipe),
            resources=Resources(threads=recipe.scorers.threads, gpus=scorer_gpus(recipe.scorers)),
            recipe=recipe,
        )


def check_for_cluster(recipe: Recipe, kind: str, units: str, pools: Iterable[str]) -> None:
    """Raise ConfigError for a recipe or names of pools that do not fit a cluster whose own scheduler starts the run.
    `units`: what the scheduler makes of learner and workers."""
    if not recipe.broker.is_embedded:
        raise ConfigError(f"`headway launch {kind}` starts a server of its own: leave broker.url out.")
    if recipe.run.is_colocated:
        raise ConfigError(
            f"On {kind.title()} learner and workers are {units} of their own: set run.placement=separated."
        )
    names = {MAIN, *(pool.name for pool in pools_of(recipe))}
    if unknown := sorted(set(pools) - names):
        raise ConfigError(f"The recipe has no pool {unknown[0]!r}, only {', '.join(sorted(names))}.")
