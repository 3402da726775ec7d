"""A run's directory: it is made once, two runs never share it, and `headway status` finds it.

runs/NAME/        config.yaml  metrics.jsonl  trained.jsonl  evaluations.jsonl  summary.json
                  last_look.json
                  report.html: the page of `headway report`
                  compare.html: the page of `headway compare` that names this run first
                  plots/  checkpoints/  experience/  replays/  logs/  sft/  stages/  broker/
                  settings.json: the recipe once more, for --resume to compare
                  identity: tells the run from another one of its name on the broker
                  incarnation: the last one that a learner of this run was given
                  broker.json: the URL of its server, while the run lasts
runs/.NAME.lock   held by the process that runs it, and names that process
"""

import fcntl
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

import msgspec
import psutil

from headway.broker.client.broker import BlockingBroker
from headway.broker.client.supervision import HEARTBEAT_TTL_S, LearnerInfo, RunUsers
from headway.broker.connection.address import without_secrets
from headway.broker.errors import ConfigError, HeadwayError
from headway.broker.keys import is_name
from headway.deploy.printing import say
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.recipe.resolve import dump_recipe, recipe_to_bytes
from headway.learner.disk import FULL, UNFINISHED, replace_file
from headway.rollout_workers.health import RUN_OVER

from .stage_output import SFT, STAGES, is_complete, is_of

CONFIG, SETTINGS, ENDPOINT, IDENTITY, INCARNATION = (
    "config.yaml",
    "settings.json",
    "broker.json",
    "identity",
    "incarnation",
)
REPORT, COMPARISON = "report.html", "compare.html"
SERVER, CHECKPOINTS, EXPERIENCE, REPLAYS = "broker", "checkpoints", "experience", "replays"
BEFORE_TRAINING = {
    CONFIG,
    SETTINGS,
    ENDPOINT,
    IDENTITY,
    INCARNATION,
    SFT,
    f".{SFT}.partial",
    f".{SFT}.checkpoints",
    f".{SFT}.identity",
    f"{SFT}.metrics.jsonl",
    STAGES,
    "tensorboard",
    "wandb",
    SERVER,
    EXPERIENCE,
    "logs",
    REPORT,
    COMPARISON,
}
"""The files and directories of a start that failed before its first step and checkpoint."""


class RunEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The server and name of a run while it runs."""

    url: str
    run: str


def prepare(recipe: Recipe, *, resume: bool, overwrite: bool, say: Callable[[str], None] = say) -> Path:
    """Make the run's directory and write config.yaml. Raises ConfigError if it holds a run already."""
    directory = recipe.run_directory
    with writable(directory):
        if resume and not (directory / CONFIG).exists():
            raise ConfigError(f"There is no run to resume in {directory}. Start it without --resume.")
        if directory.exists() and any(directory.iterdir()) and not resume:
            _clear(recipe, overwrite, say)
        (directory / "logs").mkdir(parents=True, exist_ok=True)
        replace_file(directory / CONFIG, dump_recipe(recipe).encode())
        replace_file(directory / SETTINGS, recipe_to_bytes(recipe))
    return directory


def _clear(recipe: Recipe, overwrite: bool, say: Callable[[str], None]) -> None:
    directory = recipe.run_directory
    is_ours = (directory / CONFIG).exists() or is_complete(directory / SFT)
    held = {path.name for path in directory.iterdir() if path.suffix != UNFINISHED}
    is_run = not is_ours or not held <= BEFORE_TRAINING
    if is_run and not overwrite:
        raise ConfigError(
            f"{directory} already holds a run. Go on with it (--resume), start it anew and lose what it holds"
            " (--overwrite), or choose another name (run.name=...)."
        )
    if not is_ours:
        raise ConfigError(f"{directory} holds no {CONFIG}, so it is no run of Headway's: --overwrite leaves it alone.")
    if overwrite:
        shutil.rmtree(directory)
    else:
        _clear_false_start(recipe, say)


def _clear_false_start(recipe: Recipe, say: Callable[[str], None]) -> None:
    """Keep only finished stages that this recipe would make again."""
    directory = recipe.run_directory
    for name in (SERVER, EXPERIENCE):
        shutil.rmtree(directory / name, ignore_errors=True)
    (directory / ENDPOINT).unlink(missing_ok=True)
    for left in (directory / SFT, *sorted((directory / STAGES).glob("[0-9]*"))):
        if is_complete(left) and not is_of(left, recipe):
            say(f"{left} holds a stage of another recipe; it is removed.")
            shutil.rmtree(left)


@contextmanager
def writable(directory: Path, choice: str = "run.directory=...") -> Iterator[None]:
    """Turn the system's refusal of a directory into a HeadwayError with a remedy."""
    try:
        yield
    except OSError as error:
        remedy = "make room there" if error.errno in FULL else "make this one writable"
        raise HeadwayError(
            f"{directory} cannot be made or written: {error.strerror or error}."
            f" Choose another place ({choice}), or {remedy}."
        ) from error


@contextmanager
def held(directory: Path, choice: str = "name (run.name=...)") -> Iterator[None]:
    """Hold `directory` so that no other process runs in it. The lock ends with the process, however that ends."""
    with _lock(directory) as is_ours:
        if not is_ours:
            who = _who_holds(directory)
            raise HeadwayError(f"Another process runs in {directory}{who}. Stop it first, or choose another {choice}.")
        with suppress(OSError):  # a full disk: then other processes cannot say which one holds it
            _lock_path(directory).write_bytes(msgspec.json.encode(LearnerInfo.this_process()))
        yield


def is_held(directory: Path) -> bool:
    """Whether a process runs in `directory`."""
    with _lock(directory) as is_ours:
        return not is_ours


def is_going_on(directory: Path) -> bool:
    """Whether a process runs in `directory`. Unlike `is_held` it leaves nothing where no process ever ran."""
    return _lock_path(directory).exists() and is_held(directory)


def find_run(run: str, holding: Sequence[str] = (CONFIG,)) -> Path:
    """Return the directory of that path, or else of the run of that name below ./runs, with one of these files.

    Raises ConfigError.
    """
    for directory in (Path(run), Path("runs", run)):
        if any(os.path.isfile(directory / name) for name in holding):
            return directory
    raise ConfigError(
        f"There is no run {run[:200]!r}: neither that directory nor the one below ./runs has a {' or '.join(holding)}."
    )


def _lock_path(directory: Path) -> Path:
    return directory.parent / f".{directory.name}.lock"


def _who_holds(directory: Path) -> str:
    """Return which process holds the directory; empty if that is unknown."""
    try:
        return f": {described(msgspec.json.decode(_lock_path(directory).read_bytes(), type=LearnerInfo))}"
    except (OSError, msgspec.DecodeError):
        return ""


@contextmanager
def _lock(directory: Path) -> Iterator[bool]:
    """Take the lock if it is free, and yield whether this process has it."""
    path = _lock_path(directory)
    with writable(directory):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = True
    except BlockingIOError:
        is_ours = False
    try:
        yield is_ours
    finally:
        os.close(descriptor)


def identity_of(directory: Path) -> str:
    """Return the identity of the run in `directory`; empty if it has none yet."""
    path = directory / IDENTITY
    with _read(path, "Bring it back from a copy, or start the run anew with --overwrite."):
        return path.read_text().strip() if path.exists() else ""


def write_identity(directory: Path, identity: str) -> None:
    """Write the identity durably. Call it before the run is claimed: no other learner can continue a claim without
    it."""
    _write_line(directory / IDENTITY, identity)


def last_incarnation(directory: Path) -> int:
    """Return the last incarnation; 0 before the first. A server that loses its last second, and a claim with it, would
    give the same incarnation again."""
    path = directory / INCARNATION
    remedy = f"Write into it the highest number that there is below {directory / CHECKPOINTS}, plus 100."
    with _read(path, remedy):
        return int(path.read_text()) if path.exists() else 0


def write_incarnation(directory: Path, incarnation: int) -> None:
    """Write the incarnation durably, unless a later one is noted. Call it before any weights are published under it."""
    if incarnation > last_incarnation(directory):  # else another learner has replaced this one meanwhile
        _write_line(directory / INCARNATION, f"{incarnation}")


def _write_line(path: Path, line: str) -> None:
    with writable(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, f"{line}\n".encode())


@contextmanager
def endpoint(directory: Path, url: str, run: str) -> Iterator[None]:
    """Let `headway status` find this run inside the block. The password comes from the environment of `headway
    status`."""
    path = directory / ENDPOINT
    replace_file(path, json.dumps({"url": without_secrets(url), "run": run}).encode() + b"\n")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def find_endpoint(parent: Path, run: str | None) -> RunEndpoint:
    """Return the endpoint of `run` below `parent`, or else of the run that started last. Raises HeadwayError if it does
    not run."""
    if run is not None and is_name(run) and (parent / run / ENDPOINT).exists() and is_held(parent / run):
        return read_endpoint(parent / run)
    found = newest_endpoint(parent)
    if run is not None and run != found.run:
        raise ConfigError(f"The run that is going on here is {found.run}, not {run}; name the server with --broker.")
    return found


def newest_endpoint(parent: Path) -> RunEndpoint:
    """Return the endpoint of the run below `parent` that started last. Raises HeadwayError if none runs."""
    alive = (path for path in parent.glob(f"*/{ENDPOINT}") if is_held(path.parent))  # a killed run leaves its file
    found = sorted(alive, key=lambda path: path.stat().st_mtime)
    if not found:
        raise HeadwayError(_without_endpoint(parent))
    return read_endpoint(found[-1].parent)


def find_starting(parent: Path) -> Path | None:
    """Return the directory of the run below `parent` that started last, if a process runs in it; else None. It may have
    no broker yet."""
    newest = _newest(parent)
    return newest if newest is not None and is_going_on(newest) else None


def find_newest(parent: Path) -> Path:
    """Return the directory of the run below `parent` that began or was resumed last, whether or not it runs. Raises
    ConfigError if there is none."""
    newest = _newest(parent)
    if newest is None:
        raise ConfigError(f"There is no run below {parent.resolve()}. Name the directory of one, or start one there.")
    return newest


def _newest(parent: Path) -> Path | None:
    found = max(parent.glob(f"*/{CONFIG}"), key=lambda path: path.stat().st_mtime, default=None)
    return found.parent if found is not None else None


def _without_endpoint(parent: Path) -> str:
    """Return why no run below `parent` has an endpoint, and what its user can do."""
    if (starting := find_starting(parent)) is not None:
        return (
            f"Run {starting.name} has no workers and no broker yet: it starts, or is in a stage before reinforcement"
            f" learning. Ask again later; `headway dashboard` follows it already."
        )
    newest = _newest(parent)
    report = f" The newest that has ended is shown by `headway report {newest.name}`." if newest is not None else ""
    return (
        f"No run is going on below {parent.resolve()}. Name one: --broker URL --run NAME (HEADWAY_BROKER and"
        f" HEADWAY_RUN do as well).{report}"
    )


def read_endpoint(directory: Path) -> RunEndpoint:
    """Return the endpoint that a run's directory names, whether or not the run is going on: a killed one leaves it, and
    asking takes the run's lock for a moment. Raises HeadwayError without one that can be read."""
    path = directory / ENDPOINT
    with _read(path, "Name the server and the run: --broker URL --run NAME."):
        return msgspec.json.decode(path.read_bytes(), type=RunEndpoint)


@contextmanager
def _read(path: Path, remedy: str) -> Iterator[None]:
    """Turn the error of a damaged file into a HeadwayError with a remedy."""
    try:
        yield
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors, too
        raise HeadwayError(f"{path} cannot be read: {error}. {remedy}") from error


PATIENCE_S = 3.0
"""Seconds to wait for the broker: a user waits for the answer."""
_NAMED = 3


def refuse_if_in_use(url: str, run: str, *, by_workers: bool = True) -> None:
    """Raise HeadwayError, which names the processes, if a learner or workers of the run are alive. Without `by_workers`
    neither workers count, nor a process of this machine that has ended since it was heard of."""
    client = BlockingBroker(url, run, timeout_s=PATIENCE_S)
    try:
        use = client.call(client.broker.heartbeat.users())
    finally:
        client.close()
    if not by_workers:
        use = RunUsers(state=use.state, learner=None if _has_ended(use.learner) else use.learner, workers=())
    if users := _users(use):
        raise HeadwayError(
            f"Run {run} is in use ({use.state}): {'; '.join(users)}. Stop them (a killed one is forgotten"
            f" after {HEARTBEAT_TTL_S:g} s), choose another run.name, or take the run from them with --force."
        )


def _has_ended(holder: LearnerInfo | None) -> bool:
    """Whether it was this process, or one of this machine that is not there any more."""
    if holder is None or holder.host != socket.gethostname():
        return False
    return holder.pid == os.getpid() or not psutil.pid_exists(holder.pid)


def _users(use: RunUsers) -> list[str]:
    users = [] if use.learner is None else [f"its learner is {described(use.learner)}"]
    if use.workers and use.state not in (*RUN_OVER, "absent"):
        more = f" and {len(use.workers) - _NAMED} more" if len(use.workers) > _NAMED else ""
        users.append(f"{len(use.workers)} workers are alive: {', '.join(use.workers[:_NAMED])}{more}")
    return users


def described(holder: LearnerInfo) -> str:
    """Return words such as `process 12 of ali on gpu-3, since 2026-11-23 07:00:12`, with the time of this machine."""
    since = datetime.fromtimestamp(holder.since).strftime("%Y-%m-%d %H:%M:%S")
    return f"process {holder.pid} of {holder.user} on {holder.host}, since {since}"
