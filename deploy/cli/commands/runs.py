"""The commands about existing runs: `headway status` shows one, `headway runs` all that a broker holds."""

import click

from .options import json_option, server_option


@click.command()
@click.option(
    "--broker", "url", envvar="HEADWAY_BROKER", show_envvar=True, help="Default: the newest run below ./runs."
)
@click.option("--run", "run", envvar="HEADWAY_RUN", show_envvar=True, help="The run's name.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--watch", is_flag=True, help="Look again every second, until Ctrl-C; with --json, a line each.")
def status(url: str | None, run: str | None, as_json: bool, watch: bool) -> None:
    """Show a run's versions, queues, workers, lag and throughput."""
    from deploy.roles.alone import show_status

    show_status(url, run, as_json=as_json, watch=watch)


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("workers", metavar="N|+N|-N")
@click.option("--pool", default="", help="Default: the run's only pool.")
@click.option(
    "--broker", "url", envvar="HEADWAY_BROKER", show_envvar=True, help="Default: the newest run below ./runs."
)
@click.option("--run", "run", envvar="HEADWAY_RUN", show_envvar=True, help="The run's name.")
@click.option("--wait", is_flag=True, help="Return once so many workers run, and those that leave have left.")
@json_option
def scale(workers: str, pool: str, url: str | None, run: str | None, wait: bool, as_json: bool) -> None:
    """Change the number of workers of a running run.

    N: so many in all; +N or -N: more or fewer than are wanted now. Workers that leave hand their work back first.
    It needs the learner's password; `headway status` shows the pools.
    """
    from deploy.cli.scaling import scale

    scale(workers, pool, url, run, until_done=wait, as_json=as_json)


@click.group()
def runs() -> None:
    """List, show and delete the runs that a broker holds."""


@runs.command("list")
@server_option
@click.option("--json", "as_json", is_flag=True, help="A JSON array.")
def list_runs(url: str, as_json: bool) -> None:
    """Print a line for every run: state, weights, reward, workers, bytes, and how long it has been idle."""
    from deploy.cli.runs import list_runs

    list_runs(url, as_json=as_json)


@runs.command("show")
@click.argument("run")
@server_option
@json_option
def show_run(run: str, url: str, as_json: bool) -> None:
    """Show everything about RUN."""
    from deploy.cli.runs import show_run

    show_run(url, run, as_json=as_json)


@runs.command("delete")
@click.argument("run")
@server_option
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--force", is_flag=True, help="Even if it is in use.")
@json_option
def delete_run(run: str, url: str, yes: bool, force: bool, as_json: bool) -> None:
    """Remove RUN from the broker. What it wrote to disks (checkpoints, logs) stays."""
    from deploy.cli.runs import delete_run

    def confirm(question: str) -> None:
        if not yes:
            click.confirm(question, abort=True, err=True)

    delete_run(url, run, is_forced=force, as_json=as_json, confirm=confirm)
