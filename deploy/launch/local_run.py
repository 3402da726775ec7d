"""`headway run`: every role of one run on this machine, from the recipe to the summary."""

import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from rich.table import Table

from headway.broker.client.broker import BlockingBroker
from headway.broker.connection.address import without_secrets
from headway.broker.installation import check_extra
from headway.broker.server.access import Role
from headway.broker.user_code.import_paths import in_one_paragraph, load_custom
from headway.deploy.observe.live import watch
from headway.deploy.recipe.placement import (
    check_gpus,
    check_placement,
    memory_overrides,
    opens_beside_learner,
    worker_gpus,
)
from headway.deploy.recipe.pools import MAIN, SCORER
from headway.deploy.recipe.preflight import check_start, tried
from headway.deploy.recipe.recipe import LauncherConfig, Recipe
from headway.deploy.run.record import NO_PLOT, amend_summary, can_plot, read_summary
from headway.deploy.run.resumable_keys import check_resumable
from headway.deploy.run.run_directory import (
    CHECKPOINTS,
    CONFIG,
    EXPERIENCE,
    SERVER,
    endpoint,
    held,
    prepare,
    refuse_if_in_use,
)
from headway.deploy.run.stage_output import after_stages, check_made, planned
from headway.deploy.terminal import Terminal, styled
from headway.learner.config import StageConfig
from headway.learner.experience.log import Rewind

from .base import Launcher
from .broker_server import SupervisedServer, check_traits
from .commands import (
    ProcessGroup,
    RunStart,
    ScorerCommand,
    WorkerCommand,
    learner_command,
    prepare_command,
    process_groups,
    server_command,
    stage_command,
)
from .local_launcher import LocalLauncher
from .pool_reports import pool_reports
from .process_pool import Pool
from .supervisor import RoleFailedError, Supervisor

PATIENCE_S = 3.0
"""Seconds to wait for the broker: a user waits for the answer."""
QUOTES = "'\""
SHOWN = (
    ("held-out pass rate, before", "eval_before", ".3f"),
    ("held-out pass rate, after", "eval_after", ".3f"),
    ("reward, first 3 steps", "reward_first", ".3f"),
    ("reward, last 3 steps", "reward_last", ".3f"),
    ("steps", "steps", ",d"),
    ("trajectories trained", "trained_trajectories", ",d"),
    ("  of several weight versions", "mixed_version_trajectories", ",d"),
    ("  trained twice", "trained_twice", ",d"),
    ("  left out of the loss", "untrained_trajectories", ",d"),
    ("largest lag", "max_lag_seen", "d"),
    ("  allowed", "max_lag_allowed", "d"),
    ("logprobs of engine and learner, first batch, mean difference", "agreement_mean", ".2g"),
    ("  largest", "agreement_worst", ".2g"),
    ("tokens generated a second", "generation_tokens_per_s", ",.0f"),
    ("tokens trained a second", "trained_tokens_per_s", ",.0f"),
    ("learner waiting", "learner_wait_fraction", ".0%"),
    ("worker restarts", "worker_restarts", "d"),
    ("server restarts", "server_restarts", "d"),
    ("wall clock, s", "wall_s", ",.0f"),
)
"""The keys of summary.json in the table at the end, and their headings."""
WITHOUT_ROW = {"untrained_trajectories": (None, 0), "agreement_mean": (None,), "agreement_worst": (None,)}
"""The values for which a key has no row: most losses leave nothing out, and not each run compares its engine."""


@dataclass(frozen=True)
class LocalRun:
    """One execution of `headway run`."""

    recipe: Recipe
    recipe_name: str
    overrides: Sequence[str]
    """Recipe and overrides as the user typed them, for the hints at the end."""
    console: Terminal
    start: RunStart = field(default_factory=RunStart)
    launcher: Launcher = field(default_factory=LocalLauncher)
    first: int = 0
    """The stage to begin with; those that it starts from must be done."""
    last: int | None = None
    """The stage to end with; None: the recipe's last one."""
    shares: Callable[[], Mapping[str, float]] = dict
    """Return the part of a GPU that engines of a pool get whose recipe does not say it: see `engine_shares`."""

    def run(self) -> int:
        """Run to the end and return the exit code. Raises HeadwayError."""
        if self._has_learner and self.recipe.launcher.kind == "local":
            check_placement(self.recipe, _visible(), self.shares())
        if not self.launcher.starts_processes:
            return self._show()
        check_gpus(self.recipe, self._numbers)
        with held(self.recipe.run_directory):
            return self._checked()._run()

    def _run(self) -> int:
        with ExitStack() as stack:
            directory = self._prepare()
            stack.enter_context(self._adding_remedy(directory))
            self.console.print(styled("Run ", (self.recipe.run.name, "bold"), f": {self.recipe.run_directory}"))
            if code := run_stages(self.recipe, directory, self._say, self.launcher, self._numbers):
                return code
            if not self._has_learner:
                self._say(self._where_the_model_is())
                return 0
            server = self._own_server(directory, stack)
            if self.start.overwrite:
                forget(self._url_of(Role.LEARNER, server), self.recipe.run.name)
            stack.enter_context(endpoint(directory, self._url_of(Role.OBSERVER, server), self.recipe.run.name))
            code = self._train(directory, server)
        self._conclude(directory, code)
        return code

    @contextmanager
    def _adding_remedy(self, directory: Path) -> Iterator[None]:
        """Add the command that resumes the run to the error of a role; where a disk is full, what helps comes first."""
        try:
            yield
        except RoleFailedError as error:
            command, _ = next(self._hints(1, directory))
            first = f"Make room on the disk of {os.path.relpath(directory)}, then go on: {command}"
            text = f"{first}\n{error}" if error.needs_room else f"{error}\nOnce that is mended, go on: {command}"
            raise RoleFailedError(text, error.exit_code, needs_room=error.needs_room) from error

    def _checked(self) -> Self:
        """Return this execution with the recipe's rewards tried, after all checks that take less time."""
        self.launcher.check(self.recipe)
        check_start(self.recipe, has_workers=True, is_new=not self.start.resume, say=self._say)
        if not self.recipe.broker.is_embedded:
            ping(self.recipe.broker.url, self.recipe.run.name, self._say)  # before anything is removed
            if self.start.overwrite and not self.start.is_forced:
                refuse_if_in_use(self.recipe.broker.url, self.recipe.run.name)
        check_rewind(self.recipe, self.start.rewind)
        if not self._has_learner:
            return self
        return replace(self, recipe=tried(self.recipe, self._say, calls=self.recipe.launcher.kind == "local"))

    def _prepare(self) -> Path:
        if self.start.resume:
            check_resumable(self.recipe, self.start.rewind, self._say)
        check_made(self.recipe, self._numbers)
        return prepare(self.recipe, resume=self.start.resume, overwrite=self.start.overwrite, say=self._say).resolve()

    def _own_server(self, directory: Path, stack: ExitStack) -> SupervisedServer | None:
        """Start a server for the run. Returns None if the recipe names an existing one."""
        if not self.recipe.broker.is_embedded:
            return None
        return stack.enter_context(SupervisedServer(directory / SERVER, self._say))

    def _url_of(self, role: Role, server: SupervisedServer | None) -> str:
        return server.url_of(role) if server is not None else self.recipe.broker.url

    def prepare(self) -> None:
        """Make the run's directory as `run` does before it starts anything. Raises HeadwayError."""
        with held(self.recipe.run_directory):
            self._checked()._prepare()
            if self.start.overwrite and not self.recipe.broker.is_embedded:
                forget(self.recipe.broker.url, self.recipe.run.name)

    def _show(self) -> int:
        """Give the launcher what a run would start, in that order, and write nothing."""
        directory = self.recipe.run_directory.resolve()
        self.launcher.start(prepare_command(self.recipe_name, self._shown_overrides(), self.start.options()))
        for one in planned(self.recipe):
            if (self.start.overwrite or not one.is_complete) and one.number in self._numbers:
                self.launcher.start(stage_command(self.recipe, directory, one))
        if not self._has_learner:
            return 0
        server = None
        if self.recipe.broker.is_embedded:
            server = SupervisedServer(directory / SERVER, self._say)
            self.launcher.start(server_command(directory / SERVER))
        private = Path(tempfile.gettempdir(), f"headway-workers-{self.recipe.run.name}")
        return self._supervisor(directory, server, private, self._say).run()

    @property
    def _numbers(self) -> range:
        """The stages that this execution runs."""
        return range(self.first, len(self.recipe.plan) if self.last is None else self.last + 1)

    @property
    def _has_learner(self) -> bool:
        return any(self.recipe.plan[number].has_workers for number in self._numbers)

    def _where_the_model_is(self) -> str:
        is_last = self.last is None or self.last == len(self.recipe.plan) - 1
        done = "Finished." if is_last else f"Done until stage {self.recipe.plan[self._numbers[-1]].name}."
        rest = "" if is_last else " For the stages after it, give the same command with --resume and without --until."
        ran = [one.directory for one in planned(self.recipe) if one.number in self._numbers]
        model = str(ran[-1]) if ran else after_stages(self.recipe).model.path
        return f"{done} The model is in {model}.{rest}"

    def _shown_overrides(self) -> list[str]:
        return [_showable(override) for override in self.overrides]

    def _train(self, directory: Path, server: SupervisedServer | None) -> int:
        name, recipe = self.recipe.run.name, self.recipe
        with (
            tempfile.TemporaryDirectory(prefix="headway-workers-", ignore_cleanup_errors=True) as private,
            watch(self._url_of(Role.OBSERVER, server), name, self.console, recipe.staleness.max_lag) as monitor,
        ):
            supervisor = self._supervisor(directory, server, Path(private), monitor.say)
            with pool_reports(self._url_of(Role.WORKER, server), name, supervisor.pools):
                code = supervisor.run()
        if summary := read_summary(directory):
            restarts = {  # the summary has those of other supervisors, too, but may lack the last ones
                "worker_restarts": max(supervisor.restarts, summary.get("worker_restarts", 0)),
                "server_restarts": server.restarts if server is not None else 0,
            }
            amend_summary(directory, restarts)
        return code

    def _supervisor(
        self, directory: Path, server: SupervisedServer | None, private: Path, say: Callable[[str], None]
    ) -> Supervisor:
        """Return the supervisor of the learner and its workers. The workers' own directories lie below `private`."""
        recipe = self.recipe
        groups = list(process_groups(recipe))
        pools = [Pool(group.pool, group.count, self._command(group, directory, server, private)) for group in groups]
        url, exit_notice = self._url_of(Role.LEARNER, server), private / "learner.exit_notice"
        return Supervisor(
            pools,
            learner_command(recipe, directory, url, self.start, exit_notice=exit_notice),
            recipe.workers.max_restarts,
            say=say,
            check=server.check if server is not None else None,
            launcher=self.launcher,
        )

    def _command(
        self, group: ProcessGroup, directory: Path, server: SupervisedServer | None, private: Path
    ) -> WorkerCommand:
        name, logs, config = self.recipe.run.name, directory / "logs", self.recipe.scorers
        if group.role == SCORER:
            return ScorerCommand(
                url=self._url_of(Role.SCORER, server),
                run=name,
                scorer=group.name,
                arguments=group.arguments,
                private=private,
                logs=logs,
                threads=config.threads,
                devices=[str(device) for device in config.devices],
                gpus=group.resources.gpus,
                prefix=group.pool,
                pool=group.pool,
            )
        engine, memory = group.recipe.engine, memory_overrides(self.recipe, self.shares())
        return WorkerCommand(
            url=self._url_of(Role.WORKER, server),
            run=name,
            arguments=(*group.arguments, *memory.get(group.name, ())),
            private=private,
            logs=logs,
            threads=engine.threads,
            devices=worker_gpus(group.recipe, _visible()),
            gpus=group.resources.gpus,
            prefix="worker" if group.name == MAIN else group.name,
            pool=group.name,
            ahead=directory / CONFIG if opens_beside_learner(group.recipe, _visible()) else None,
            engine=engine.kind,
        )

    def _conclude(self, directory: Path, code: int) -> None:
        if summary := read_summary(directory):
            self.console.print(summary_table(summary, self.recipe.run.name))
        plots = sorted((directory / "plots").glob("*.png"))
        for plot in plots:
            self._say(f"Plot: {os.path.relpath(plot)}")
        if summary and not plots and not can_plot():
            self._say(NO_PLOT)
        self._say("What to try next:")
        for command, what in self._hints(code, directory):
            self._say(f"  {what}:\n    {command}")

    def _hints(self, code: int, directory: Path) -> Iterator[tuple[str, str]]:
        resolved = shlex.quote(os.path.relpath(directory / CONFIG))
        checkpoints = sorted((directory / CHECKPOINTS).glob("*/step_*"), key=lambda path: path.stat().st_mtime)
        if code:
            without = "begin with the first step, since there is no checkpoint yet; finished stages stay"
            yield f"{program()} run {resolved} --resume", "go on from the last checkpoint" if checkpoints else without
            return
        run = shlex.quote(os.path.relpath(directory))
        yield f"{program()} report {run}", "see the run as a page: reward, lag, time, events"
        yield f"{program()} run {self._with_a_looser_bound()}", "the same with a looser bound on lag"
        if checkpoints:
            yield (
                f"{program()} eval {resolved} --checkpoint {shlex.quote(os.path.relpath(checkpoints[-1]))}",
                "measure the trained model on held-out prompts",
            )
        yield f"{program()} status --watch", "look into a run from another terminal"

    def _with_a_looser_bound(self) -> str:
        """Return the arguments as the user typed them, with a looser bound on lag and a name that is free."""
        bound = max(8, 2 * self.recipe.staleness.max_lag)
        parent, name = self.recipe.run_directory.parent, "stale"
        while (parent / name).exists():
            name = f"{name}-{bound}"
        new = {"staleness.max_lag": f"{bound}", "run.name": name}
        kept = [_showable(override) for override in self.overrides if override.partition("=")[0].strip() not in new]
        return shlex.join([self.recipe_name, *kept, *(f"{key}={value}" for key, value in new.items())])

    def _say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)


def _visible() -> str:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "")


def _showable(override: str) -> str:
    """Return the override with the password of a URL removed."""
    key, sign, value = override.partition("=")
    return f"{key}{sign}{without_secrets(value.strip(QUOTES))}" if key.strip() == "broker.url" else override


def run_stages(
    recipe: Recipe,
    directory: Path,
    say: Callable[[str], None],
    launcher: Launcher | None = None,
    numbers: Container[int] | None = None,
) -> int:
    """Run the recipe's unfinished stages that need no workers, one after another, or those of them with these numbers,
    and return the exit code."""
    launcher = launcher or LocalLauncher()
    for one in planned(recipe):
        if one.is_complete or (numbers is not None and one.number not in numbers):
            continue
        command = stage_command(recipe, directory, one)
        supervisor = Supervisor(
            (), command, drain_notice=stop_notice(one.stage), fails_when_stopped=True, say=say, launcher=launcher
        )
        if code := supervisor.run():
            return code
    return 0


def stop_notice(stage: StageConfig) -> str:
    """Return what `headway` prints when a stage without workers is told to stop."""
    return f"stage {stage.name} goes on from here next time"


def ping(url: str, run: str, say: Callable[[str], object]) -> None:
    """Print what is risky about the server. Raises BrokerUnavailableError if none answers, BrokerError for an invalid
    URL or a server that Headway cannot use."""
    BlockingBroker(url, run, timeout_s=PATIENCE_S).close()
    check_traits(url, say, timeout_s=PATIENCE_S)


def forget(url: str, run: str) -> None:
    """Delete what the server holds of an overwritten run."""
    broker = BlockingBroker(url, run)
    try:
        broker.call(broker.broker.status.delete_run())
    finally:
        broker.close()


def program() -> str:
    """Return what the user types for `headway`: its path if the virtual environment is not active."""
    own = Path(sys.executable).with_name(
        "headway"
    )  # a run's processes start as `python -m headway`, no command to type
    return "headway" if shutil.which("headway") else os.path.relpath(own if own.exists() else sys.argv[0])


def check_rewind(recipe: Recipe, rewind: Rewind | None) -> None:
    """Raise HeadwayError, before anything is started, if the run cannot go back to that step."""
    if rewind is None:
        return
    from headway.learner.checkpoint import CheckpointStore
    from headway.learner.experience.log import ExperienceLog
    from headway.learner.experience.log import check_rewind as check

    directory = recipe.run_directory
    check(
        CheckpointStore(directory / CHECKPOINTS, recipe.checkpoint.keep), ExperienceLog(directory / EXPERIENCE), rewind
    )


def summary_table(summary: dict[str, Any], run: str) -> Table:
    """Return summary.json as a table for people."""
    table = Table(title=f"Run {run}", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for label, key, form in SHOWN:
        value = summary.get(key)
        if value not in WITHOUT_ROW.get(key, ()):
            table.add_row(label, "-" if value is None else format(value, form))
    return table


def open_launcher(config: LauncherConfig) -> Launcher:
    """Open the recipe's launcher. A user's own is called as Class(**options). Raises ConfigError if it cannot be made
    or is no launcher."""
    with in_one_paragraph(config.kind, "launcher"):
        match config.kind:
            case "local":
                from .local_launcher import LocalLauncher

                return LocalLauncher(**config.options)
            case "ray":
                check_extra("ray", "ray", "launcher.kind=ray", name="Ray")
                from .ray_launcher import RayLauncher

                return RayLauncher(**config.options)
            case path:
                launcher: Launcher = load_custom(path, Launcher, "launcher.kind", lambda own: own(**config.options))
                return launcher
