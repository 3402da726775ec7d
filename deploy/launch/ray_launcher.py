"""The `ray` launcher: Ray finds a node for each command, and an actor there starts the command as a child process.

    RayLauncher.start ──► RayHandle ──► RayActor (an actor on some node) ──► the command's process

Ray only places processes and notices that a node is gone. The supervisor restarts them, and data and weights keep their
own ways. The actor takes the CPUs and GPUs of its command, all of them on one node: `RayPlacement` says what Ray sets
aside and where.
"""

import asyncio
import logging
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util import placement_group, placement_group_table
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from headway.broker.config import BrokerConfig
from headway.broker.errors import ConfigError
from headway.deploy.recipe.pools import LEARNER, WHERE, RayRole, ray_role

from .base import DONE_EXITS, ERROR_PREFIX, Command, Handle, Launcher, Resources
from .commands import learner_resources, process_groups
from .local_launcher import Child

if TYPE_CHECKING:
    from headway.deploy.recipe.recipe import Recipe


GROUP_S = 30.0
"""Seconds to wait until Ray has placed a group beside which a process is to lie."""
LEAST_CPU = 0.001
"""CPUs that a group sets aside for a process that takes nothing else: Ray makes no empty groups."""


class RayPlacement:
    """Returns the options of Ray for each command of a run."""

    def __init__(self, roles: Mapping[str, Any], *, reserves_cpus: bool) -> None:
        self._roles, self._reserves_cpus = roles, reserves_cpus
        self._counts: dict[str, int] = {}
        self._groups: dict[str, PlacementGroup] = {}

    def plan(self, recipe: "Recipe") -> None:
        """Note how many processes each pool starts with: its placement group has a place for each of them.

        Raises ConfigError for a role that asks for fewer GPUs than one of its processes needs.
        """
        groups = [(group.role, group.pool, group.resources.gpus, group.count) for group in process_groups(recipe)]
        for kind, pool, gpus, count in ((LEARNER, "", learner_resources(recipe).gpus, 1), *groups):
            role, needed = ray_role(self._roles, kind, pool), gpus or 0
            if role.gpus is not None and (role.gpus < needed if needed > 1 else role.gpus == 0 < needed):
                raise ConfigError(
                    f"{WHERE} gives {role.gpus:g} GPUs to each process of {pool or kind}, which needs {needed}. Only a"
                    " process of one GPU can share it, by a fraction above 0."
                )
            self._counts[pool] = max(1, count)

    def options(self, command: Command) -> dict[str, Any]:
        """Return the options for the actor of this command."""
        role = ray_role(self._roles, command.role, command.pool)
        claims = _claims(command.resources, role, reserves_cpus=self._reserves_cpus)
        options = {**claims, "scheduling_strategy": self._strategy(command, role, claims)}
        return options | ({"runtime_env": role.runtime_env} if role.runtime_env else {})

    def _strategy(self, command: Command, role: RayRole, claims: Mapping[str, Any]) -> Any:
        """Return where the command belongs: into its pool's group, or beside it if the pool has grown beyond that."""
        beside = "SPREAD" if role.placement == "spread" else "DEFAULT"
        count = self._counts.get(command.pool)
        if role.placement is None or count is None:
            return beside
        if command.pool not in self._groups:
            bundles = [_bundle(claims) for _ in range(count)]
            self._groups[command.pool] = placement_group(bundles, strategy=role.placement.upper())
        group = self._groups[command.pool]
        if command.number < count:
            return PlacementGroupSchedulingStrategy(group)
        if role.placement != "strict_pack":
            return beside
        if not group.wait(GROUP_S):  # its own places are all taken by then, so a process more would wait there for ever
            log.warning(
                "%s has no place on one node yet, and its process %d goes to any.", command.pool, command.number
            )
            return beside
        node = placement_group_table(group)["bundles_to_node_id"][0]
        return NodeAffinitySchedulingStrategy(node, soft=False)


def _claims(resources: Resources, role: RayRole, *, reserves_cpus: bool) -> dict[str, Any]:
    """Return what Ray sets aside for a command. On one's own machine its processes share the CPUs, as without Ray."""
    cpus = resources.processes * (resources.threads or 1) if reserves_cpus else 0
    gpus = resources.gpus or 0 if role.gpus is None else role.gpus
    return {"num_cpus": cpus, "num_gpus": gpus} | ({"resources": role.resources} if role.resources else {})


def _bundle(claims: Mapping[str, Any]) -> dict[str, float]:
    """Return the same as a place in a group."""
    amounts = {"CPU": claims["num_cpus"], "GPU": claims["num_gpus"], **claims.get("resources", {})}
    return {name: amount for name, amount in amounts.items() if amount} or {"CPU": LEAST_CPU}


LOCAL = "local"
"""The address for a Ray that is started here and ends with this process."""
PLACE_S = 10.0
"""Seconds to wait for a command's place before others are placed, and before the log says that there is none."""
ALMOST_PLACED_S = 2.0
"""Seconds to wait for a sign that a command has started, before it is stopped as one that has not."""
ANSWER_S = 10.0
"""Seconds to wait for an answer of an actor. One that gives none is killed, or its log is not shown."""
LOOPBACK = ("localhost", "127.", "::1")

log = logging.getLogger(__name__)


class RayLauncher(Launcher):
    """Starts commands on the nodes of a Ray cluster, or of a Ray that it starts on this machine."""

    def __init__(
        self,
        address: str = LOCAL,
        runtime_env: Mapping[str, Any] | None = None,
        roles: Mapping[str, Any] | None = None,
    ) -> None:
        """Connect. `address`: `local` starts a Ray, `auto` finds the one of this machine, and others are Ray's own.
        `runtime_env`: the environment that Ray makes for the actors, by its documentation. `roles`: the keys of a
        `RayRole` for learner, worker, scorer and single pools."""
        self._is_local = address == LOCAL
        self._places = RayPlacement(roles or {}, reserves_cpus=not self._is_local)
        if not ray.is_initialized():
            if self._is_local:
                os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            own = {"include_dashboard": False} if self._is_local else {}
            ray.init(address=address, runtime_env=dict(runtime_env or {}), logging_level=logging.WARNING, **own)

    def check(self, recipe: "Recipe") -> None:
        """Raise ConfigError for a recipe that chooses its GPUs itself, or whose broker other nodes cannot reach."""
        if recipe.run.is_colocated:
            raise ConfigError(
                "run.placement=colocated puts each engine on the GPU of one of the learner's ranks, and with"
                " launcher.kind=ray Ray chooses the GPUs of each process. Log in to the node that has the GPUs, and"
                " start the run there by `headway run` with launcher.kind=local; or leave out run.placement."
            )
        if any((recipe.workers.devices, *(pool.devices for pool in recipe.workers.pools))):
            raise ConfigError(
                "workers.devices names GPUs, and with launcher.kind=ray Ray chooses the GPUs of each process. Leave it"
                " out, also of workers.pools. Processes that launcher.options.roles gives a fraction of `gpus` share"
                " one, and a resource of your own names a kind of GPU."
            )
        self._places.plan(recipe)
        others = sorted({node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]} - {socket.gethostname()})
        if others and _is_only_here(recipe.broker):
            raise ConfigError(
                f"broker.url={recipe.broker.url.partition('?')[0]} reaches a server on this machine only, and the Ray"
                f" cluster has other nodes ({', '.join(others[:3])}). Start a Redis or Valkey that all of them reach,"
                " and give its address as broker.url."
            )

    def start(self, command: Command) -> "RayHandle":
        return RayHandle(command, self._places.options(command))


class RayHandle(Handle):
    """A command that an actor starts. While Ray has no place for it, it has not ended."""

    def __init__(self, command: Command, options: Mapping[str, Any]) -> None:
        """`options`: of its actor, see `RayPlacement.options`."""
        super().__init__(command)
        actor = ray.remote(RayActor).options(**options, max_restarts=0, max_task_retries=0)
        self._actor = actor.remote(_complete(command), sys.executable, os.getcwd())
        self._node, self._end = self._actor.node.remote(), self._actor.ended.remote()
        self._outcome: Outcome | None = None
        self._loss = ""
        self._log: str | None = None
        self._started, self._is_reported = time.monotonic(), False
        self._wish = command.name, _wish(options)
        self._given_up_at: float | None = None
        """The time at which a command that was asked to end waits for a place no longer."""
        if command.cwd is None:  # workers that are placed before a learner could take its node's last GPU
            ray.wait([self._node], timeout=PLACE_S)

    def exit_code(self) -> int | None:
        if self._outcome is None:
            self._look()
        return None if self._outcome is None else self._outcome.code

    def terminate(self) -> None:
        if self.exit_code() is None and self._given_up_at is None:
            self._actor.terminate.remote()  # reaches the command as soon as it has a place
            self._given_up_at = time.monotonic() + ALMOST_PLACED_S

    def kill(self) -> None:
        if self._log is not None:
            return
        outcome, self._log = Outcome(-signal.SIGKILL), self._loss
        was_just_started = time.monotonic() < self._started + PLACE_S
        if not self._loss and self._is_placed(ALMOST_PLACED_S if was_just_started else 0):
            with suppress(RayError):  # the actor is gone meanwhile, and its child with it
                outcome, self._log = ray.get(self._actor.kill.remote(), timeout=ANSWER_S)
        ray.kill(self._actor)
        self._outcome = self._outcome or outcome

    def log(self) -> str:
        if self._log is not None or self._loss:
            return self._log or self._loss
        if not self._is_placed():
            return ""
        try:
            said: str = ray.get(self._actor.log.remote(), timeout=ANSWER_S)
        except RayError as error:
            return f"(Its log cannot be read: {_first_line(error)})"
        return said

    def has_place(self) -> bool:
        return self._is_placed()

    def is_done(self) -> bool:
        return self.exit_code() in DONE_EXITS and self._outcome is not None and self._outcome.is_done

    def describe_exit(self) -> str:
        return "was lost with its node or its actor" if self._loss else super().describe_exit()

    def _look(self) -> None:
        if not ray.wait([self._end], timeout=0)[0]:
            self._wait_for_a_place()
            return
        try:
            self._outcome = ray.get(self._end)
        except ActorUnavailableError:  # a broken connection: the actor may live
            self._end = self._actor.ended.remote()
        except RayError as error:
            self._loss = _first_line(error)
            self._outcome = Outcome(-signal.SIGKILL)

    def _is_placed(self, timeout_s: float = 0) -> bool:
        return bool(ray.wait([self._node], timeout=timeout_s)[0])

    def _wait_for_a_place(self) -> None:
        """Say once that there is none so far, and give up waiting for it if the command was asked to end."""
        now = time.monotonic()
        if not self._is_reported and now > self._started + PLACE_S:
            self._is_reported = True
            if not self._is_placed():
                log.warning("%s waits for a node of the Ray cluster with room for it: %s.", *self._wish)
        if self._given_up_at is not None and now > self._given_up_at and not self._is_placed():
            self._outcome = Outcome(-signal.SIGTERM)
            self.kill()


def _complete(command: Command) -> Command:
    """Return the command with those variables of this process that any node's process of the run needs."""
    ours = {name: value for name, value in os.environ.items() if name.startswith("HEADWAY_")}
    place = {"HEADWAY_IMPORT_PATH": os.getcwd()}
    return replace(command, environment={**place, **ours, **command.environment})


def _wish(options: Mapping[str, Any]) -> str:
    """Return what a process waits for, such as `num_cpus=1, num_gpus=0.5, big=1`."""
    amounts = {name: options[name] for name in ("num_cpus", "num_gpus")} | options.get("resources", {})
    return ", ".join(f"{name}={amount:g}" for name, amount in amounts.items())


def _is_only_here(config: BrokerConfig) -> bool:
    host = urlsplit(config.url).hostname or ""
    return config.is_embedded or config.url.startswith("unix:") or host.startswith(LOOPBACK)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


POLL_S = 0.1
CANNOT_START = 127
"""The exit code of a command that could not be started, as a shell gives it."""


@dataclass(frozen=True)
class Outcome:
    """The end of a command."""

    code: int
    """Its exit code; negative: the signal that ended it."""
    is_done: bool = False
    """Whether it did its work, see `Handle.is_done`: its exit notice lies on its own node."""


class RayActor:
    """The actor of one command: it starts the same child as the `local` launcher, on the node where Ray placed it.

    The child watches the actor's process, so it ends with the actor, whose end Ray brings about when the node or the
    driver is gone. All its methods run in one thread, and only `ended` takes long.
    """

    def __init__(self, command: Command, python: str, home: str) -> None:
        """Start the command. `python`: the driver's interpreter, for which this node's is put in its place. `home`: the
        driver's directory, in which a command without a directory of its own runs; it must exist here too."""
        here = tuple(sys.executable if word == python else word for word in command.argv)
        self._command = replace(command, argv=here, cwd=command.cwd or Path(home))
        self._temporary = command.cwd if command.cwd is not None and not command.cwd.exists() else None
        self._made: Path | None = None
        """The directory of exit notices that this host made. On the driver's node the driver made it, for itself."""
        self._child: Child | None = None
        self._failure = ""
        try:
            if command.cwd is None and not Path(home).is_dir():
                raise FileNotFoundError(f"this node has no {home}: let it and the nodes share a file system")
            if command.exit_notice is not None and not command.exit_notice.parent.exists():
                self._made = command.exit_notice.parent
                self._made.mkdir(parents=True, exist_ok=True)
            self._child = Child(self._command)
        except OSError as error:
            self._failure = f"{ERROR_PREFIX}{command.name} cannot start on {socket.gethostname()}: {error}\n"

    def node(self) -> str:
        """Return the name of the machine. It answers once Ray has placed the actor."""
        return socket.gethostname()

    async def ended(self) -> Outcome:
        """Wait for the command's end."""
        while self._child is not None and self._child.exit_code() is None:  # noqa: ASYNC110 - a process sets no event
            await asyncio.sleep(POLL_S)
        return self._outcome()

    def terminate(self) -> None:
        """Ask the command to end in an orderly way."""
        if self._child is not None:
            self._child.terminate()

    def log(self) -> str:
        """Return the end of what the command has printed."""
        return self._failure if self._child is None else self._child.log()

    def kill(self) -> tuple[Outcome, str]:
        """End the command and all that it started, and return how it ended and its log."""
        if self._child is not None:
            self._child.kill()
        outcome, log = self._outcome(), self.log()
        self._clear()
        return outcome, log

    def _outcome(self) -> Outcome:
        code = CANNOT_START if self._child is None else self._child.exit_code()
        assert code is not None
        return Outcome(code, self._child is not None and self._child.is_done())

    def _clear(self) -> None:
        """Remove the directory that was made for the command, as far as no other command on this node uses it."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
        if self._command.exit_notice is not None:
            self._command.exit_notice.unlink(missing_ok=True)
        if self._made is not None:
            with suppress(OSError):  # other processes of the run are there
                self._made.rmdir()
