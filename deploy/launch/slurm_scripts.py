"""The batch scripts of a run on a Slurm cluster: one for each role, and one that submits them all.

    DIRECTORY/   submit.sh  broker.sh  learner.sh  workers.sh  workers-POOL.sh ...  scorer-NAME.sh ...  stop.sh
                 recipe.yaml
                 server/    the embedded server's data and passwords
                 logs/      what the jobs print
                 address, jobs.txt   written by the broker's job and by submit.sh

Every script is whole: a head with Slurm's options and the settings of this run, and bodies from `deploy/slurm/`: that
of all jobs (`job.sh`: a child process, how it is told to drain, how the job is queued again), and that of its role. The
directory, the run's directory and the Python environment must have the same paths on every node.

The invariant: no script contains a password. Roles read them from the files below `server/passwords`.
"""

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from urllib.parse import quote

from headway.broker.errors import ConfigError
from headway.broker.server.access import Credentials, Role, User
from headway.deploy.recipe.pools import MAIN, POOL, WORKER
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.recipe.resolve import dump_recipe
from headway.deploy.run.run_directory import writable
from headway.deploy.run.stage_output import planned
from headway.learner.disk import replace_file

from .base import Command, Resources
from .commands import ProcessGroup, check_for_cluster, learner_resources, process_groups

BROKER, LEARNER, WORKERS, SCORERS, STOP = "broker", "learner", "workers", "scorers", "stop"
ROLES = (BROKER, LEARNER, WORKERS, SCORERS, STOP)
ARRAYS = (WORKERS, SCORERS)
"""The roles whose jobs are arrays. They end after the learner."""
BROKER_THREADS = 2
SERVER = "server"


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """The user's wishes for the cluster."""

    nodes: int = 1
    """Nodes of the learner."""
    pools: Mapping[str, int]
    """Workers of a pool, instead of the recipe's number."""
    time: str
    """Slurm's time limit of every job."""
    grace_s: int
    """Seconds before the time limit at which a job is told to drain, and after which its command is killed."""
    port: int
    """The broker's port; 0: a free one."""
    sbatch: Sequence[str] = ()
    """Further options of sbatch, each as OPTION or ROLE:OPTION."""


@dataclass(frozen=True, kw_only=True)
class _Job:
    """One script: the options and settings of its head."""

    role: str
    name: str
    """The name of the script, without suffix."""
    options: Sequence[str]
    resources: Resources
    settings: Mapping[str, str | int | Sequence[str]]


def slurm_scripts(recipe: Recipe, directory: Path, options: SlurmOptions) -> dict[str, str]:
    """Return the scripts for this directory by their names, submit.sh first.

    Raises ConfigError for a recipe or options that do not fit a cluster.
    """
    _check(recipe, options)
    directory = directory.resolve()
    jobs = list(_jobs(recipe, directory, options))
    scripts = {f"{job.name}.sh": _script(job, recipe, directory, options) for job in jobs}
    return {"submit.sh": _submission(jobs, directory), **scripts}


def write_slurm_scripts(recipe: Recipe, directory: Path, options: SlurmOptions) -> list[Path]:
    """Write the scripts and return their paths, submit.sh first. Passwords and data that are there already are kept.

    Raises ConfigError for a recipe or options that do not fit a cluster.
    """
    scripts, directory = slurm_scripts(recipe, directory, options), directory.resolve()
    with writable(directory, "--output"):
        (directory / SERVER).mkdir(parents=True, exist_ok=True)
        (directory / SERVER).chmod(0o700)
        (directory / "logs").mkdir(exist_ok=True)
        Credentials(directory / SERVER).make()
        replace_file(directory / "recipe.yaml", dump_recipe(recipe).encode())
        for stale in (*directory.glob(f"{WORKERS}*.sh"), *directory.glob(f"{POOL}*.sh")):
            stale.unlink()
        for name, text in scripts.items():
            replace_file(directory / name, text.encode())
            (directory / name).chmod(0o755)
    return [directory / name for name in scripts]


def _check(recipe: Recipe, options: SlurmOptions) -> None:
    check_for_cluster(recipe, "slurm", "jobs", options.pools)
    if recipe.learner.processes % options.nodes:
        raise ConfigError(
            f"learner.processes={recipe.learner.processes} ranks cannot be spread evenly over {options.nodes} nodes."
        )
    for option in options.sbatch:
        role, own = _split(option)
        if not own.startswith("-") or "\n" in own or role not in ("", *ROLES):
            raise ConfigError(
                f"--sbatch {option!r}: give an option such as --partition=gpu, or ROLE:OPTION with one of the roles"
                f" {', '.join(ROLES)}."
            )


def _jobs(recipe: Recipe, directory: Path, options: SlurmOptions) -> Iterator[_Job]:
    yield _Job(
        role=BROKER,
        name=BROKER,
        options=("--nodes=1", "--ntasks=1"),
        resources=Resources(threads=BROKER_THREADS, gpus=0),
        settings={"PYTHON": sys.executable, "SERVER_DIRECTORY": str(directory / SERVER), "PORT": options.port},
    )
    yield _learner(recipe, directory, options)
    for group in process_groups(recipe):
        count = options.pools.get(group.name, group.count) if group.role == WORKER else group.count
        if count:  # Slurm has no job array of none
            yield _array(group, count, directory)
    yield _Job(
        role=STOP,
        name=STOP,
        options=("--nodes=1", "--ntasks=1"),
        resources=Resources(threads=1, gpus=0),
        settings={},
    )


def _learner(recipe: Recipe, directory: Path, options: SlurmOptions) -> _Job:
    resources, on_a_node = learner_resources(recipe), recipe.learner.processes // options.nodes
    return _Job(
        role=LEARNER,
        name=LEARNER,
        options=(f"--nodes={options.nodes}", f"--ntasks-per-node={on_a_node}"),
        resources=Resources(threads=resources.threads, gpus=(resources.gpus or 0) // options.nodes),
        settings={
            **_login(Role.LEARNER, directory),
            "RECIPE": str(directory / "recipe.yaml"),
            "RUN_DIRECTORY": str(recipe.run_directory.resolve()),
            "RANKS": recipe.learner.processes,
            "THREADS": recipe.learner.threads,
            "STAGES": [f"{stage.number} {stage.directory.resolve()}" for stage in planned(recipe)],
        },
    )


def _array(group: ProcessGroup, count: int, directory: Path) -> _Job:
    """Return the script of a pool, or of a scorer. Each of its processes sees the GPUs of its job, and no other one."""
    if group.role == WORKER:
        role, name = WORKERS, WORKERS if group.name == MAIN else f"{WORKERS}-{group.name}"
        settings = {**_login(Role.WORKER, directory), "POOL": group.name}
    else:
        role, name = SCORERS, group.pool
        settings = {**_login(Role.SCORER, directory), "SCORER": group.name}
    return _Job(
        role=role,
        name=name,
        options=("--nodes=1", "--ntasks=1", f"--array=0-{count - 1}"),
        resources=group.resources,
        settings={**settings, "ARGUMENTS": group.arguments},
    )


def _login(role: Role, directory: Path) -> dict[str, str]:
    """Return the settings with which a role starts Python and logs in."""
    file = Credentials(directory / SERVER).file(role)
    return {"PYTHON": sys.executable, "BROKER_USER": User(role, None, "").name, "PASSWORD_FILE": quote(str(file))}


def _script(job: _Job, recipe: Recipe, directory: Path, options: SlurmOptions) -> str:
    """Return the whole script of a job."""
    name = f"headway-{recipe.run.name}-{job.name}"
    log = "%x-%A_%a.log" if job.role in ARRAYS else "%x-%j.log"
    taken = job.resources
    head = [
        f"--job-name={name}",
        f"--output={directory / 'logs' / log}",
        "--open-mode=append",
        f"--time={options.time}",
        f"--signal=B:USR1@{options.grace_s}",
        "--requeue",
        f"--cpus-per-task={taken.threads}",
        *([f"--gres=gpu:{taken.gpus}"] if taken.gpus else []),
        *job.options,
        *(own for role, own in map(_split, options.sbatch) if role in ("", job.role)),
    ]
    environment = Command(
        name=job.name,
        argv=(),
        log=None,
        environment={"HEADWAY_RUN": recipe.run.name},
        resources=Resources(threads=taken.threads),
    ).variables()
    common = {"DIRECTORY": str(directory), "WORK_DIRECTORY": os.getcwd()}
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {_quoted(option)}" for option in head),
            "",
            *_settings({**common, "GRACE_S": options.grace_s, **job.settings}),
            *(f"export {_setting(*each)}" for each in environment.items()),
            "",
            *(_body(part) for part in ("job.sh", f"{job.role}.sh")),
        ]
    )


def _split(option: str) -> tuple[str, str]:
    """Return the role that an option of sbatch is for, empty for all roles, and the option."""
    role, _, own = ("", "", option) if option.startswith("-") else option.partition(":")
    return role, own


def _submission(jobs: Sequence[_Job], directory: Path) -> str:
    scripts = [f"{job.name}.sh" for job in jobs if job.role in ARRAYS]
    settings = _settings({"DIRECTORY": str(directory), "WORKER_SCRIPTS": scripts})
    return "\n".join(["#!/bin/bash", *settings, "", _body("submit.sh")])


def _settings(values: Mapping[str, str | int | Sequence[str]]) -> list[str]:
    return [_setting(name, value) for name, value in values.items()]


def _setting(name: str, value: str | int | Sequence[str]) -> str:
    if isinstance(value, str | int):
        return f"{name}={shlex.quote(str(value))}"
    return f"{name}=({shlex.join(value)})"


def _quoted(option: str) -> str:
    """Return the option as sbatch reads it from a script: it takes double quotes around a blank."""
    return f'"{option}"' if " " in option else option


def _body(name: str) -> str:
    return (files("headway.deploy") / "slurm" / name).read_text()
