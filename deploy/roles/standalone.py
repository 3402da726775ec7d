"""Each role by itself, in its own terminal or on its own machine: what the commands do around the roles' own work."""

import functools
import logging
import os
import re
import secrets
import shlex
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import msgspec

from headway.broker.connection.address import without_password
from headway.broker.errors import SIGNALLED_EXIT, ConfigError, ForeignRunError
from headway.broker.keys import check_name
from headway.deploy.launch.base import WORKER_SESSION, WORKER_TAG, Launcher, write_exit_notice
from headway.deploy.launch.broker_server import check_may_work, check_traits, ignoring_absent_server
from headway.deploy.launch.commands import RunStart, ScorerCommand, WorkerCommand, learner_command, sft_command
from headway.deploy.launch.local_run import check_rewind, forget, ping, program, run_stages, stop_notice
from headway.deploy.launch.pool_reports import death_reports, pool_reports
from headway.deploy.launch.process_pool import DRAIN_WORKER_S, Pool
from headway.deploy.launch.supervisor import Supervisor
from headway.deploy.observe.live import watch as watch_run
from headway.deploy.observe.status_tables import MOST_OF_PREFIX, UNNAMED
from headway.deploy.printing import complain, say, say_json
from headway.deploy.recipe.preflight import check_start, tried
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.recipe.resolve import SOURCE, overridden
from headway.deploy.recipe.validate import check_engine_kind
from headway.deploy.run.resumable_keys import check_resumable
from headway.deploy.run.run_directory import CHECKPOINTS, endpoint, held, prepare, refuse_if_in_use
from headway.deploy.run.stage_output import after_stages, check_made, is_complete, is_of, mark_complete, planned
from headway.deploy.terminal import Terminal
from headway.rollout_workers.config import AgentConfig, EngineConfig, ScorersConfig, WorkersConfig
from headway.rollout_workers.engines import visible_devices
from headway.weightsync.config import WeightsConfig

from .config_watch import ConfigChangedError
from .run_client import PATIENCE_S

log = logging.getLogger(__name__)

DEVICES = "workers.devices="
_WORKERS_OWN = (
    "engine.",
    "weights.follow=",
    "weights.archive=",
    "weights.pull_",
    "workers.metrics_",
    "agent.host=",
    "agent.port=",
    DEVICES,
)
"""The start of overrides that a worker may choose for itself: its engine, how it is connected and watched."""


def run_learner(recipe: Recipe, url: str, start: RunStart, *, is_prepared: bool) -> int:
    """Run the learner, or one rank of it, in this process; or start torchrun if the recipe wants several ranks.
    `is_prepared`: a supervisor has checked the recipe and made the run's directory."""
    is_rank, is_first = "RANK" in os.environ, os.environ.get("RANK", "0") == "0"
    if is_rank and not is_prepared:
        _check_stages_are_done(recipe, start)
    with ExitStack() as stack:
        if not is_prepared and is_first:
            stack.enter_context(held(recipe.run_directory))
            check_start(recipe, has_workers=False, is_new=not start.resume, say=complain)
        if not is_prepared and recipe.has_learner:  # by each rank, as each reads the prompts
            recipe = tried(recipe, say if is_first else lambda text: None, calls=is_first)
        if not is_prepared and is_first:
            ping(url, recipe.run.name, complain)  # first: a run that cannot start leaves nothing and removes nothing
            check_rewind(recipe, start.rewind)
            if start.resume:
                check_resumable(recipe, start.rewind, say)
            if start.overwrite and not start.is_forced:
                refuse_if_in_use(url, recipe.run.name)
            directory = prepare(recipe, resume=start.resume, overwrite=start.overwrite, say=say)
            if start.overwrite:
                forget(url, recipe.run.name)
            stack.enter_context(endpoint(directory, url, recipe.run.name))
            say(f"Run {recipe.run.name}: {os.path.relpath(directory)}. Loading the model takes a moment.")
        if not is_prepared and not is_rank and (code := run_stages(recipe, recipe.run_directory.resolve(), say)):
            return code
        if not recipe.has_learner:
            say(f"Finished. The model is in {after_stages(recipe).model.path}.")
            return 0
        recipe = after_stages(recipe)
        if recipe.learner.processes > 1 and not is_rank:
            return _run_ranks(recipe, url, start)
        from .learner import train

        is_finished = train(recipe, url, resume=start.resume, rewind=start.rewind)
    if is_first:
        _say_how_it_ended(recipe, is_finished)
        write_exit_notice()
    return 0


def _say_how_it_ended(recipe: Recipe, is_finished: bool) -> None:
    report = f"{program()} report {shlex.quote(os.path.relpath(recipe.run_directory))}"
    if is_finished:
        say(f"Finished. See how it went: {report}")
    else:
        has_any = any((recipe.run_directory / CHECKPOINTS).glob("*/step_*"))
        go_on = "To go on from the last checkpoint, add --resume."
        anew = "There is no checkpoint yet: with --resume it begins with the first step, and finished stages stay."
        say(f"Stopped. {go_on if has_any else anew} See how it went: {report}")


def _check_stages_are_done(recipe: Recipe, start: RunStart) -> None:
    """Raise ConfigError, under the user's own torchrun, where a stage that comes before the learner is not done."""
    for one in planned(recipe):
        directory = one.directory
        if one.is_complete if start.resume else is_of(directory, recipe) and not start.overwrite:
            continue
        which = f" --stage {one.number}" if one.number else ""
        raise ConfigError(
            f"Stage {one.stage.name} comes first, and {directory} does not hold its model yet. Under torchrun, run"
            f" `headway sft RECIPE --output {directory}{which}` first"
            + (", and leave --overwrite out, which would remove it." if start.overwrite else ".")
        )


def run_workers(
    url: str,
    run: str,
    count: int,
    overrides: Sequence[str],
    allowed: Sequence[str] = (),
    launcher: Launcher | None = None,
    pool: str = "",
    grace_s: float = DRAIN_WORKER_S,
) -> int:
    """Supervise `count` workers until the run is over or a signal stops them. They may import what is `allowed`, and
    have `grace_s` seconds to hand their work back.

    `pool`: the name by which `headway scale` knows them, and with which their names begin; empty: a pool named after
    this host and this process, with workers that are called `worker`.

    A launcher that starts no processes only gets their commands.
    """
    own = _own_of(overrides)
    devices = visible_devices(own.workers.devices, own.engine)
    prefix = check_name(pool or UNNAMED, "pool")[:MOST_OF_PREFIX]
    pool = pool or f"{_host()}-{os.getpid()}"
    named = [argument for module in allowed for argument in ("--allow-import", module)]
    graced = () if grace_s == DRAIN_WORKER_S else ("--grace-s", f"{grace_s:g}")
    arguments = (*named, *graced, *(one for one in overrides if not one.startswith(DEVICES)))
    command_in = functools.partial(
        WorkerCommand,
        url=url,
        run=run,
        arguments=arguments,
        threads=own.engine.threads,
        devices=devices,
        prefix=prefix,
    )
    if launcher is not None:
        return _give_commands(launcher, command_in, f"headway-workers-{run}", count)
    with ignoring_absent_server():  # workers wait for the broker
        check_traits(url, complain, timeout_s=PATIENCE_S)
        check_may_work(url, run, timeout_s=PATIENCE_S)
    logs = Path(tempfile.mkdtemp(prefix="headway-logs-"))
    with tempfile.TemporaryDirectory(prefix="headway-workers-", ignore_cleanup_errors=True) as private:
        pools = [Pool(pool, count, command_in(private=Path(private), logs=logs), grace_s)]
        say(
            f"{count} worker{'s' * (count != 1)} for run {run} at {without_password(url)}, as pool {pool}; logs in"
            f" {logs}. Ctrl-C hands their work back and stops."
        )
        with watch_run(url, run, Terminal()) as monitor, pool_reports(url, run, pools):
            return Supervisor(pools, say=monitor.say).run()


def run_worker(
    url: str,
    run: str,
    name: str,
    overrides: Sequence[str],
    allowed: Sequence[str] = (),
    grace_s: float = DRAIN_WORKER_S,
) -> int:
    """Run one worker, and return its exit code. Its id is new for every process, so that a restarted worker is not
    taken for the dead one.

    If another run takes the name over, or the run's configuration changes, the process executes itself anew with the
    same arguments and joins that run: it keeps no weights, caches or leases.
    """
    from .worker import work

    return _run_process(name, lambda own, session: work(url, run, own, overrides, allowed, grace_s, session))


def run_scorer(url: str, run: str, scorer: str, name: str, overrides: Sequence[str]) -> int:
    """Run one process of a scorer, and return its exit code; an empty `scorer` is the run's only one. It starts anew as
    a worker does."""
    from .scorer import score

    return _run_process(name, lambda own, session: score(url, run, own, scorer, overrides, session))


def _run_process(name: str, run_role: Callable[[str, str], bool]) -> int:
    """Run a role under a name of this process alone and with its session. Returns the exit code."""
    tag, session = os.environ.get(WORKER_TAG) or secrets.token_hex(2), os.environ.get(WORKER_SESSION, "")
    try:
        is_signalled = run_role(check_name(f"{_host()}-{name}-{tag}", "worker"), session)
    except (ForeignRunError, ConfigChangedError) as error:
        log.warning("%s This process starts anew.", error)
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    write_exit_notice()
    return SIGNALLED_EXIT if is_signalled and session else 0  # without a supervisor it has just done as asked


def _give_commands(launcher: Launcher, command_in: Callable[..., WorkerCommand], place: str, count: int) -> int:
    """Give a launcher that starts no processes the commands of a pool."""
    private = Path(tempfile.gettempdir(), place)
    command = command_in(private=private, logs=private / "logs")
    for number in range(count):
        launcher.start(command(number))
    return 0


def run_scorers(
    url: str, run: str, scorer: str, count: int, overrides: Sequence[str], launcher: Launcher | None = None
) -> int:
    """Supervise `count` processes of a scorer until the run is over or a signal stops them. An empty `scorer` is the
    run's only one. A launcher that starts no processes only gets their commands."""
    check_name(run, "run")
    for override in overrides:
        if not override.startswith("scorers."):
            raise ConfigError(
                f"A scorer cannot take the override {override!r}: all but scorers.* comes from the run's configuration."
            )
    own = overridden(_ScorersOwn(), overrides).scorers
    command_in = functools.partial(
        ScorerCommand,
        url=url,
        run=run,
        arguments=overrides,
        threads=own.threads,
        devices=[str(device) for device in own.devices],
        prefix=scorer or "scorer",
        scorer=scorer,
    )
    if launcher is not None:
        return _give_commands(launcher, command_in, f"headway-scorers-{run}", count)
    with ignoring_absent_server():  # scorers wait for the broker
        check_traits(url, complain, timeout_s=PATIENCE_S)
    logs = Path(tempfile.mkdtemp(prefix="headway-logs-"))
    with tempfile.TemporaryDirectory(prefix="headway-scorers-", ignore_cleanup_errors=True) as private:
        pools = [Pool(scorer or "scorers", count, command_in(private=Path(private), logs=logs))]
        say(
            f"{count} scorer{'s' * (count != 1)} for run {run} at {without_password(url)}; logs in {logs}. Ctrl-C hands"
            " their work back and stops."
        )
        with death_reports(url, run, pools):
            return Supervisor(pools).run()


def _host() -> str:
    """Return this machine's name, in the characters that a worker's name may have."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:40].lstrip("._-") or "host"


def run_sft(recipe: Recipe, output: Path, arguments: Sequence[str], number: int = 0) -> int:
    """Run a stage without workers, or one rank of it, in this process; or start torchrun with `arguments` if the recipe
    wants several ranks. `number`: the index among the recipe's stages.

    The directory is marked complete at the very end.
    """
    if number not in [one.number for one in planned(recipe)]:
        raise ConfigError(
            "The recipe has no stage without workers: sft.phases is empty, and its first stage needs workers."
        )
    check_made(recipe, [number])
    if is_complete(output):
        raise ConfigError(
            f"{output} already holds the model of a finished stage. Choose another --output, or remove it."
        )
    if recipe.learner.processes > 1 and "RANK" not in os.environ:
        command = sft_command(recipe, arguments, number)
        return Supervisor((), command, drain_notice=stop_notice(recipe.plan[number]), fails_when_stopped=True).run()
    from .workerless_stage import fine_tune

    is_first = os.environ.get("RANK", "0") == "0"
    outcome = fine_tune(recipe, output, console=Terminal(quiet=not is_first), number=number)
    if is_first:
        mark_complete(output, recipe, outcome, number)
        say(f"Stage {recipe.plan[number].name} is done: {output}")
    return 0


def run_eval(recipe: Recipe, checkpoint: Path, prompts: int | None, *, as_json: bool) -> None:
    """Print the pass rate of the model in a directory, or of a run's newest whole checkpoint."""
    if os.path.isfile(checkpoint):
        raise ConfigError(f"{checkpoint} is a file; --checkpoint wants the directory of a model.")
    if not os.path.exists(checkpoint / "config.json"):
        from .trained_model import find_trained

        checkpoint = find_trained(str(checkpoint)).path
    from .held_out_evaluation import evaluate_checkpoint

    result = evaluate_checkpoint(recipe, checkpoint, prompts)
    if as_json:
        say_json(result, in_one_line=True)
        return
    at_k = f" (pass@{result.samples}: {result.pass_at_k:.3f})" if result.samples > 1 else ""
    say(
        f"Pass rate {result.pass_rate:.3f}{at_k} on {result.prompts} held-out prompts; mean reward"
        f" {result.reward_mean:.3f}, {result.response_tokens_mean:.1f} tokens a response."
    )


def run_replay(
    run: str, preset: str | None, overrides: Sequence[str], *, first_step: int, steps: int | None, as_json: bool
) -> int:
    """Print how the replay compares. Returns 1 if the same settings did not give the same bits."""
    from headway.deploy.run.run_directory import find_run

    from .replay import Replay, comparison_json, comparison_table, replayed_recipe, verdict
    from .trained_model import original_recipe

    original = original_recipe(find_run(run))
    recipe = replayed_recipe(original, preset, overrides)
    comparison = Replay(original=original, recipe=recipe, first_step=first_step, steps=steps).run()
    if as_json:
        say_json(comparison_json(comparison))
    else:
        Terminal().print(comparison_table(comparison))
        for sentence in verdict(comparison):
            say(sentence)
        say(f"Replay: {comparison.directory}")
    return 0 if comparison.is_as_promised else 1


def _run_ranks(recipe: Recipe, url: str, start: RunStart) -> int:
    command = learner_command(recipe, recipe.run_directory, url, start)
    return Supervisor((), replace(command, log=None)).run()


class _WorkersOwn(msgspec.Struct, frozen=True, kw_only=True):
    """The sections of a recipe that a worker may override in part."""

    engine: EngineConfig = EngineConfig()
    weights: WeightsConfig = WeightsConfig()
    workers: WorkersConfig = WorkersConfig()
    agent: AgentConfig = AgentConfig()


class _ScorersOwn(msgspec.Struct, frozen=True, kw_only=True):
    """The section of a recipe that a scorer may override."""

    scorers: ScorersConfig = ScorersConfig()


def _own_of(overrides: Sequence[str]) -> _WorkersOwn:
    """Return what --count workers choose for themselves. Raises ConfigError for an override that a worker may not
    choose, or could not read."""
    for override in overrides:
        if not override.startswith(_WORKERS_OWN):
            raise ConfigError(
                f"A worker cannot take the override {override!r}: all but engine.*, weights.follow,"
                " weights.archive, weights.pull_*, workers.devices, workers.metrics_*, agent.host and agent.port comes"
                " from the run's configuration, so that learner and workers agree. Give it to `headway learner`"
                " instead."
            )
    own = overridden(_WorkersOwn(), overrides)
    check_engine_kind(own.engine, f"{SOURCE}: engine")
    return own
