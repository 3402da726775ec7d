"""The commands about existing runs: `headway status` shows one, `headway runs` lists, shows and deletes those of a
broker.
"""

import click

from headway.broker.installation import check_extra
from headway.deploy.printing import complain

from .options import F, json_option, server_option


def _run_options(command: F) -> F:
    """--broker and --run of a run that is going on, the newest below ./runs by default."""
    command = click.option("--run", "run", envvar="HEADWAY_RUN", show_envvar=True, help="The run's name.")(command)
    return click.option(
        "--broker", "url", envvar="HEADWAY_BROKER", show_envvar=True, help="Default: the newest run below ./runs."
    )(command)


@click.command()
@_run_options
@json_option
@click.option("--watch", is_flag=True, help="Look again every second, until Ctrl-C; with --json, a line each.")
def status(url: str | None, run: str | None, as_json: bool, watch: bool) -> None:
    """Show a run's versions, queues, workers, lag and throughput."""
    from headway.deploy.roles.run_client import show_status

    show_status(url, run, as_json=as_json, watch=watch)


@click.command()
@_run_options
def top(url: str | None, run: str | None) -> None:
    """Show a run on the whole screen, with keys that scale its pools and send workers away.

    It shows workers, versions, lag, queues, rates, and what happens. + and - change the number of workers of the pool
    under the cursor, d drains the worker under the cursor and x quarantines it, ? explains the keys, q quits and leaves
    the run as it is.
    """
    check_extra("top", "textual", "headway top")
    complain("Loading, and looking for the run ...")
    from .top import watch_on_screen

    watch_on_screen(url, run)


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("workers", metavar="N|+N|-N")
@click.option("--pool", default="", help="Default: the run's only pool.")
@_run_options
@click.option("--wait", is_flag=True, help="Return once so many workers work, and those that leave have left.")
@json_option
def scale(workers: str, pool: str, url: str | None, run: str | None, wait: bool, as_json: bool) -> None:
    """Change the number of workers of a running run.

    N: so many in all; +N or -N: more or fewer than are wanted now. Workers that leave hand their work back first.
    It needs the learner's password; `headway status` shows the pools.
    """
    from headway.deploy.roles.run_client import scale_pool

    scale_pool(workers, pool, url, run, until_done=wait, as_json=as_json)


@click.command()
@click.option("--most", type=click.IntRange(1, 4096), required=True, help="The most workers of the pool.")
@click.option("--least", type=click.IntRange(0, 4096), default=1, show_default=True, help="The fewest.")
@click.option("--pool", default="", help="Default: the run's only pool.")
@click.option(
    "--wait",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.1,
    show_default=True,
    help="The share of its time for which the learner may wait for samples.",
)
@click.option(
    "--busy",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.6,
    show_default=True,
    help="Engines with a smaller share of their places in use count as idle.",
)
@click.option("--steps", type=click.IntRange(1, 100), default=5, show_default=True, help="Steps that are looked at.")
@click.option("--cooldown-s", type=click.FloatRange(0), default=30.0, show_default=True, help="Time between changes.")
@click.option("--dry-run", is_flag=True, help="Explain each decision, and change nothing.")
@click.option(
    "--serve",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="Change nothing, and say over HTTP how many workers the pool should have.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="With --serve: listen at this address.")
@_run_options
@click.option("--json", "as_json", is_flag=True, help="A JSON object for each decision.")
def autoscale(
    most: int,
    least: int,
    pool: str,
    wait: float,
    busy: float,
    steps: int,
    cooldown_s: float,
    dry_run: bool,
    serve: int | None,
    host: str,
    url: str | None,
    run: str | None,
    as_json: bool,
) -> None:
    """Scale a pool of a running run until the run is over.

    Out when the learner waits for samples and the pool's engines are busy; in when it hardly waits, and these engines
    are idle, or the lag or the age of the queue is close to staleness.ahead. Ctrl-C leaves the pool as it is. It needs
    the learner's password; --dry-run and --serve do not. With --serve, pools whose names begin with that of --pool and
    a dot count as one.
    """
    if least > most:
        raise click.UsageError("--least is above --most.")
    from headway.deploy.roles.autoscaler import Targets

    targets = Targets(least=least, most=most, wait=wait, busy=busy, steps=steps)
    if serve is not None:
        if dry_run or as_json or not pool:
            raise click.UsageError("--serve needs --pool, and excludes --dry-run and --json.")
        from headway.deploy.roles.autoscaler import serve_autoscale

        serve_autoscale(url, run, pool, targets, host=host, port=serve, cooldown_s=cooldown_s)
        return
    from headway.deploy.roles.autoscaler import keep_scaling

    keep_scaling(url, run, pool, targets, cooldown_s=cooldown_s, dry_run=dry_run, as_json=as_json)


@click.command()
@click.argument("workers", nargs=-1, required=True, metavar="WORKER...")
@_run_options
@json_option
def drain(workers: tuple[str, ...], url: str | None, run: str | None, as_json: bool) -> None:
    """Ask single workers to hand their work back and leave.

    WORKER is a worker's name, or a part that no other worker's name has; `headway status` names them. Their pool does
    not replace them until it is scaled. It needs the learner's password.
    """
    from headway.deploy.roles.run_client import send_away

    send_away(workers, "drain", url, run, as_json=as_json)


@click.command()
@click.argument("workers", nargs=-1, required=True, metavar="WORKER...")
@_run_options
@json_option
def quarantine(workers: tuple[str, ...], url: str | None, run: str | None, as_json: bool) -> None:
    """Let single workers have no more samples, such as those of a sick machine.

    A worker in quarantine ends, and its supervisor starts another process in its place. WORKER is a worker's name, or a
    part that no other worker's name has. It needs the learner's password.
    """
    from headway.deploy.roles.run_client import send_away

    send_away(workers, "quarantine", url, run, as_json=as_json)


@click.group()
def runs() -> None:
    """List, show and delete the runs that a broker holds."""


@runs.command("list")
@server_option
@click.option("--json", "as_json", is_flag=True, help="A JSON array.")
def list_runs(url: str, as_json: bool) -> None:
    """Print a line for every run: state, weights, reward, workers, bytes, and how long it has been idle."""
    from headway.deploy.roles.run_client import print_runs

    print_runs(url, as_json=as_json)


@runs.command("show")
@click.argument("run")
@server_option
@json_option
def show_run(run: str, url: str, as_json: bool) -> None:
    """Show everything about RUN."""
    from headway.deploy.roles.run_client import print_run

    print_run(url, run, as_json=as_json)


@runs.command("delete")
@click.argument("run")
@server_option
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--force", is_flag=True, help="Even if it is in use.")
@json_option
def delete_run(run: str, url: str, yes: bool, force: bool, as_json: bool) -> None:
    """Remove RUN from the broker. What it wrote to disks (checkpoints, logs) stays."""
    from headway.deploy.roles.run_client import remove_run

    def confirm(question: str) -> None:
        if not yes:
            click.confirm(question, abort=True, err=True)

    remove_run(url, run, is_forced=force, as_json=as_json, confirm=confirm)
