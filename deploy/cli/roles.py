"""The commands for one role of a run, or for one part of its work, in this terminal."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from headway.deploy.printing import OF_ROLES, log_to_stderr

from .options import (
    StartOptions,
    allow_import_option,
    connection_options,
    dry_run_option,
    json_option,
    overrides_argument,
    start_options,
)

if TYPE_CHECKING:
    from headway.deploy.launch.base import Launcher

DEFAULT_PORT = 6380


@click.command()
@click.option("--directory", type=click.Path(path_type=Path), default=Path("broker-data"), help="Where its data live.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=DEFAULT_PORT,
    show_default=True,
    help="On 127.0.0.1; 0: a unix socket instead.",
)
@click.option("--host", metavar="ADDRESS", help="Listen at this address of this machine, too. Nothing is encrypted.")
@click.option("--url", help="Start nothing; check the server that runs there.")
def broker(directory: Path, port: int, host: str | None, url: str | None) -> int:
    """Run the embedded server alone, or check your own Redis or Valkey."""
    if host and not port:
        raise click.UsageError("--host needs a port.")
    from headway.broker.server.embedded import LOOPBACK
    from headway.deploy.launch.broker_server import check_server, run_server

    return check_server(url) if url else run_server(directory, port or None, host or LOOPBACK)


@click.command()
@click.argument("recipe")
@overrides_argument
@connection_options
@start_options
@click.option("--processes", type=click.IntRange(min=1), help="Ranks on this machine: learner.processes.")
@click.option("--prepared", is_flag=True, hidden=True, help="A supervisor has made the run's directory.")
def learner(
    recipe: str,
    overrides: tuple[str, ...],
    url: str,
    run: str,
    start: StartOptions,
    processes: int | None,
    prepared: bool,
) -> int:
    """Run the learner alone.

    It gives the resolved RECIPE to the workers through the broker.
    """
    from headway.deploy.recipe.resolve import load_recipe

    begins = start.checked()
    _log_to_stderr()
    ranks = (f"learner.processes={processes}",) if processes else ()
    loaded = load_recipe(recipe, (*overrides, f"run.name='{run}'", *ranks))
    from headway.deploy.roles.standalone import run_learner

    return run_learner(loaded, url, begins, is_prepared=prepared)


@contextmanager
def _shown_instead(dry_run: bool, as_json: bool) -> "Iterator[Launcher | None]":
    """Yield the launcher of --dry-run; None without it. Raises UsageError."""
    if not dry_run:
        if as_json:
            raise click.UsageError("--json needs --dry-run.")
        yield None
        return
    from .run import printing_launcher

    with printing_launcher(as_json) as launcher:
        yield launcher


dry_run_json_option = click.option("--json", "as_json", is_flag=True, help="With --dry-run: one JSON object.")
grace_option = click.option(
    "--grace-s",
    type=click.FloatRange(1, 3600),
    default=20.0,
    show_default=True,
    help="Seconds for a worker to hand its work back when it is asked to leave. Then it is killed.",
)


@click.command()
@overrides_argument
@connection_options
@allow_import_option
@click.option("--count", type=click.IntRange(0, 1024), default=1, show_default=True, help="Worker processes.")
@click.option("--pool", default="", help="Its name for `headway scale`.  [default: HOST-PROCESS]")
@grace_option
@dry_run_option
@dry_run_json_option
def workers(
    overrides: tuple[str, ...],
    url: str,
    run: str,
    allowed: tuple[str, ...],
    count: int,
    pool: str,
    grace_s: float,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Run a pool of COUNT workers.

    They take all keys but engine.*, weights.follow, weights.archive, weights.pull_*, workers.devices,
    workers.metrics_*, agent.host and agent.port from the run's own configuration, which the broker holds. Workers may
    start before the learner, and leave and join while it trains; `headway scale` changes their number. At Ctrl-C or
    SIGTERM they hand their work back and stop.
    """
    from headway.deploy.roles.standalone import run_workers

    with _shown_instead(dry_run, as_json) as launcher:
        return run_workers(url, run, count, overrides, allowed, launcher, pool=pool, grace_s=grace_s)


@click.command()
@overrides_argument
@connection_options
@allow_import_option
@click.option("--host", default="127.0.0.1", show_default=True, help="The address at which it listens.")
@click.option("--port", type=click.IntRange(1, 65535), default=8800, show_default=True, help="Its port.")
@grace_option
@dry_run_option
@dry_run_json_option
def gateway(
    overrides: tuple[str, ...],
    url: str,
    run: str,
    allowed: tuple[str, ...],
    host: str,
    port: int,
    grace_s: float,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Run a worker whose episodes are played by agents that start themselves.

    The run's agent.kind is external. Agents ask for a task with POST http://HOST:PORT/sessions and the key of the
    environment variable HEADWAY_GATEWAY_KEY, call the model below the URL that they get, and end the episode with POST
    to /finish below it. A gateway that starts again at the same address with the same key goes on with its episodes.
    Anyone who reaches the port can talk to it without TLS: put a proxy before it, or listen at 127.0.0.1.
    """
    from headway.deploy.roles.standalone import run_workers

    own = (*overrides, f"agent.host='{host}'", f"agent.port={port}")
    with _shown_instead(dry_run, as_json) as launcher:
        return run_workers(url, run, 1, own, allowed, launcher, pool=f"gateway-{port}", grace_s=grace_s)


@click.command()
@overrides_argument
@connection_options
@click.option(
    "--scorer", default="", metavar="NAME", help="A reward's name, or teacher.  [default: the run's only one]"
)
@click.option("--count", type=click.IntRange(0, 1024), default=1, show_default=True, help="Processes of it.")
@dry_run_option
@dry_run_json_option
def scorers(
    overrides: tuple[str, ...], url: str, run: str, scorer: str, count: int, dry_run: bool, as_json: bool
) -> int:
    """Run COUNT processes that score responses.

    Each holds the model of a reward of kind reward_model, or the teacher, and takes all keys but scorers.* from the
    run's own configuration, which the broker holds. They may start before the learner, and leave and join while it
    trains. At Ctrl-C they hand their work back and stop.
    """
    from headway.deploy.roles.standalone import run_scorers

    with _shown_instead(dry_run, as_json) as launcher:
        return run_scorers(url, run, scorer, count, overrides, launcher)


@click.command(hidden=True)
@overrides_argument
@connection_options
@click.option("--scorer", default="", help="The scorer's name.")
@click.option("--name", default="scorer", help="Its name in logs and tables; made unique.")
def scorer(overrides: tuple[str, ...], url: str, run: str, scorer: str, name: str) -> int:
    """Run one process of a scorer, as `run` and `scorers` start it."""
    _log_to_stderr()
    from headway.deploy.roles.standalone import run_scorer

    return run_scorer(url, run, scorer, name, overrides)


@click.command(hidden=True)
@overrides_argument
@connection_options
@allow_import_option
@click.option("--name", default="worker", help="Its name in logs and tables; made unique.")
@grace_option
def worker(overrides: tuple[str, ...], url: str, run: str, allowed: tuple[str, ...], name: str, grace_s: float) -> int:
    """Run one worker in this process, as `run` and `workers` start it."""
    _log_to_stderr()
    from headway.deploy.roles.standalone import run_worker

    return run_worker(url, run, name, overrides, allowed, grace_s)


@click.command()
@click.argument("recipe")
@overrides_argument
@click.option("--output", type=click.Path(path_type=Path), help="Directory of the model.  [default: runs/NAME/sft]")
@click.option("--stage", "number", type=click.IntRange(min=0), default=0, hidden=True, help="Which of its stages.")
def sft(recipe: str, overrides: tuple[str, ...], output: Path | None, number: int) -> int:
    """Run the first stage of RECIPE alone, such as its supervised warm-up."""
    return _train(recipe, overrides, output, f"{number}")


class _Train(click.Command):
    """Its help lists the kinds of stages, which are imported only then."""

    def format_help_text(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the description, and the kinds."""
        super().format_help_text(context, formatter)
        from headway.learner.stages.registry import RECORD_STAGES

        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(f"Kinds: {', '.join(kind.replace('_', '-') for kind in RECORD_STAGES)}, and your own.")


@click.command(cls=_Train)
@click.argument("stage")
@click.argument("recipe")
@overrides_argument
@click.option("--output", type=click.Path(path_type=Path), help="Directory of the model.  [default: below runs/NAME]")
def train(stage: str, recipe: str, overrides: tuple[str, ...], output: Path | None) -> int:
    """Run one STAGE of RECIPE alone: its name, its kind such as sft, or its number from 0.

    It starts from the model that an earlier stage has left below runs/NAME, and must not need workers.
    """
    return _train(recipe, overrides, output, stage)


def _train(recipe: str, overrides: tuple[str, ...], output: Path | None, stage: str) -> int:
    from headway.deploy.recipe.resolve import load_recipe

    loaded = load_recipe(recipe, overrides)
    from headway.deploy.recipe.stage_graph import number_of
    from headway.deploy.roles.standalone import run_sft
    from headway.deploy.run.stage_output import directory_of

    number = number_of(loaded.plan, stage)
    directory = output or directory_of(loaded, number)
    arguments = (recipe, *overrides, "--output", str(directory), "--stage", f"{number}")
    return run_sft(loaded, directory, arguments, number)


@click.command("eval")
@click.argument("recipe")
@overrides_argument
@click.option(
    "--checkpoint", type=click.Path(path_type=Path), required=True, help="A model's directory; or a run: its newest."
)
@click.option("--prompts", type=click.IntRange(min=1), help="Held-out prompts.  [default: evaluation.prompts]")
@json_option
def evaluate(recipe: str, overrides: tuple[str, ...], checkpoint: Path, prompts: int | None, as_json: bool) -> None:
    """Measure a model's pass rate on the held-out prompts of RECIPE."""
    from headway.deploy.recipe.resolve import load_recipe

    loaded = load_recipe(recipe, overrides)
    from headway.deploy.roles.standalone import run_eval

    run_eval(loaded, checkpoint, prompts, as_json=as_json)


@click.command()
@click.argument("run")
@overrides_argument
@click.option("--algorithm", "preset", help="Train with this preset's loss instead: grpo, gspo, tis, ...")
@click.option(
    "--from",
    "first_step",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Start from this checkpoint; 0: from the first weights.",
)
@click.option("--steps", type=click.IntRange(min=1), help="Replay so many steps.  [default: all that were logged]")
@json_option
def replay(
    run: str, overrides: tuple[str, ...], preset: str | None, first_step: int, steps: int | None, as_json: bool
) -> int:
    """Train RUN's learner again from its experience log, and compare.

    The replay runs offline in one process, without broker and workers, on the same batches in the same order. RUN is
    a name below ./runs or a directory. With the run's own settings the result is the same to the last bit, or else
    the exit code is 1. With another loss the replay shows what that loss makes of the same experience.
    """
    _log_to_stderr()
    from headway.deploy.roles.standalone import run_replay

    return run_replay(run, preset, overrides, first_step=first_step, steps=steps, as_json=as_json)


def _log_to_stderr() -> None:
    """Log to stderr: a role logs to its log file, or to the terminal that it has for itself."""
    log_to_stderr(logging.INFO, OF_ROLES)
