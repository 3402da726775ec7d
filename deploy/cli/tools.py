"""Commands that need no run: what works on this machine, what fits, which losses exist, what a role may do on a server,
and working examples to start from.
"""

import math
from pathlib import Path

import click

from headway.broker.errors import ConfigError
from headway.deploy.printing import say, say_json

from .options import json_option, overrides_argument


@click.command()
@click.option("--run", help="Users for this run only.  [default: for all runs]")
@click.option(
    "--passwords",
    type=click.Path(path_type=Path),
    help="YAML that maps learner, worker, observer and scorer to passwords.  [default: new ones, shown on stderr]",
)
@click.option("--aclfile", "as_file", is_flag=True, help="Lines for the server's aclfile instead of commands.")
@click.option("--redis-7.0", "is_for_7_0", is_flag=True, help="Leave out what Redis 7.0 does not know.")
def acl(run: str | None, passwords: Path | None, as_file: bool, is_for_7_0: bool) -> None:
    """Print the server's rules for a user per role: learner, worker, observer, scorer.

    Pipe them into `valkey-cli` or `redis-cli`. The default user stays as it is; switch it off once
    these work. Then give each role a URL such as redis://headway-worker@host:6379?password_file=FILE, or its
    password in HEADWAY_BROKER_PASSWORD.
    """
    from headway.broker.server.access import users

    given = _read_passwords(passwords) if passwords else dict[str, str]()
    for user in users(run, given):
        command = "user" if as_file else "ACL SETUSER"
        say(f"{command} {user.name} {' '.join(user.rules(is_for_7_0=is_for_7_0))}")
        if not as_file:
            say(f"CLIENT KILL USER {user.name}")  # otherwise a client that came in by the old password stays
        if user.role not in given:
            say(f"{user.name} {user.password}", to_stderr=True)


@click.command()
@click.argument("name", required=False)
@json_option
def algorithms(name: str | None, as_json: bool) -> None:
    """Show the losses with their equations, defaults and sources.

    With NAME, show one preset or one function in full.
    """
    from headway.deploy.terminal import Terminal
    from headway.learner.objective.catalog import compositions, find, functions

    from .algorithm_tables import overview, page

    if as_json:
        found = find(name) if name else [*compositions(), *functions()]
        say_json({"algorithms": found})
        return
    for shown in [page(one) for one in find(name)] if name else [overview()]:
        Terminal().print(shown)


def _finite(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is given; expected a finite number.", context, parameter)
    return value


@click.command("plan-memory")
@click.argument("recipe")
@overrides_argument
@click.option(
    "--device-memory",
    type=click.FloatRange(min=0),
    callback=_finite,
    metavar="GB",
    help="Say what fits a device of this size.",
)
@json_option
def plan_memory(recipe: str, overrides: tuple[str, ...], device_memory: float | None, as_json: bool) -> int:
    """Show what each rank of RECIPE's learner will hold, before anything starts.

    Neither weights nor a GPU are needed. The exit code is 1 if --device-memory is too little.
    """
    from headway.deploy.recipe.resolve import load_recipe
    from headway.deploy.terminal import Terminal

    from .memory_report import as_builtins, page, report

    found = report(load_recipe(recipe, overrides), device_memory)
    if as_json:
        say_json(as_builtins(found))
    else:
        Terminal().print(page(found))
    return int(found.fits is False)


@click.command()
@click.option("--grafana", "file", flag_value="grafana.json", help="A dashboard, to import into Grafana.")
@click.option("--alerts", "file", flag_value="alerts.yaml", help="Alerting rules, for rule_files of prometheus.yml.")
def metrics(file: str | None) -> None:
    """Print a Grafana dashboard or Prometheus rules for a run's metrics.

    Both query what learner and workers serve with a metric sink of kind prometheus and with workers.metrics_port.
    """
    if file is None:
        raise click.UsageError("Give --grafana or --alerts.")
    from importlib.resources import files

    say(files("headway.deploy.observe.prometheus").joinpath(file).read_text().rstrip())


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Show what works on this machine.

    It also shows what is installed, and how to install the rest.
    """
    from headway.deploy.terminal import Terminal

    from .doctor import examine, report_tables

    report = examine()
    if as_json:
        say_json(report)
        return
    Terminal().print(report_tables(report))


def _read_passwords(path: Path) -> dict[str, str]:
    from headway.broker.server.access import Role
    from headway.deploy.recipe.parse import read_yaml

    given = read_yaml(path)
    unknown = sorted(set(given) - set(Role))
    if unknown or not all(isinstance(password, str) and password for password in given.values()):
        raise ConfigError(
            f"{path} must map roles ({', '.join(Role)}) to passwords"
            + (f", and {unknown[0]!r} is none of them." if unknown else "; put a password into quotes.")
        )
    return given


@click.group(no_args_is_help=True)
def new() -> None:
    """Write a working example, to be changed into your own."""


@new.command()
@click.argument("directory", type=click.Path(path_type=Path))
@json_option
def flow(directory: Path, as_json: bool) -> None:
    """Write a training flow of your own into DIRECTORY, which must not exist.

    It has a prompt source, a reward, an environment, an objective, a stage and a metric sink, each in a short file,
    with tests and a recipe that trains a tiny model on a CPU in less than a minute.
    """
    from headway.deploy.flow.interface import write_flow

    files = write_flow(directory)
    if as_json:
        say_json({"directory": str(directory), "files": files})
        return
    for file in files:
        say(str(directory / file))
    say(f"Try it: cd {directory} && pytest && headway run recipe.yaml")
