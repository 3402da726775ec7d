"""`headway run`, `headway ray up` and `headway launch`: a whole run on this machine, on the nodes of a Ray cluster, or
the files with which a cluster's own scheduler starts it.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from headway.deploy.printing import complain, say, say_json

from .options import StartOptions, json_option, overrides_argument, run_arguments, start_options

if TYPE_CHECKING:
    from headway.deploy.launch.base import Launcher
    from headway.deploy.launch.commands import RunStart
    from headway.deploy.recipe.recipe import Recipe


@click.command()
@run_arguments
@click.option(
    "--from", "first", metavar="STAGE", help="Go on (--resume) with this stage; what it starts from must be done."
)
@click.option("--until", "last", metavar="STAGE", help="End with this stage, such as sft or its number.")
def run(
    recipe: str,
    overrides: tuple[str, ...],
    start: StartOptions,
    dry_run: bool,
    as_json: bool,
    first: str | None,
    last: str | None,
) -> int:
    """Run a whole RECIPE on this machine.

    It starts a server, the stages before the learner, the learner and its workers. RECIPE is a YAML file or the
    name of one that ships. Ctrl-C drains, writes a checkpoint and stops; a second one stops at once.
    """
    if first is not None and start.overwrite:
        raise click.UsageError("--from and --overwrite exclude each other: --overwrite removes what stages have left.")
    start = replace(start, resume=start.resume or first is not None)
    return execute(recipe, overrides, start.checked(), dry_run=dry_run, as_json=as_json, first=first, last=last)


def execute(
    recipe: str,
    overrides: tuple[str, ...],
    start: "RunStart",
    *,
    dry_run: bool,
    as_json: bool,
    first: str | None = None,
    last: str | None = None,
) -> int:
    """Run the recipe with the launcher that it names, and return the exit code."""
    from headway.deploy.recipe.resolve import load_recipe

    loaded = load_recipe(recipe, overrides, hint=complain)
    from headway.deploy.launch.local_run import LocalRun, open_launcher
    from headway.deploy.recipe.stage_graph import number_of
    from headway.deploy.run.record import read_summary
    from headway.deploy.terminal import Terminal

    terminal = Terminal(stderr=as_json)
    begins = number_of(loaded.plan, first) if first is not None else 0
    ends = number_of(loaded.plan, last) if last is not None else None
    if ends is not None and ends < begins:
        raise click.UsageError(f"--until {last} comes before --from {first}.")

    shares = cache(partial(_shares, loaded))

    def local(launcher: "Launcher") -> LocalRun:
        return LocalRun(loaded, recipe, overrides, terminal, start, launcher, begins, ends, shares)

    if dry_run:
        with printing_launcher(as_json) as launcher:
            return local(launcher).run()
    code = local(open_launcher(loaded.launcher)).run()
    if as_json:
        say_json(read_summary(loaded.run_directory))
    return code


def _shares(recipe: "Recipe") -> Mapping[str, float]:
    """Return what the engines of each pool get of the GPUs that they share on this machine."""
    from headway.deploy.recipe.placement import engine_shares, only_gpu_bytes

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def part_of_learner(_: str) -> float | None:
        if (device_bytes := only_gpu_bytes(visible)) is None:
            return None
        from .memory_report import learner_part  # it takes seconds to import

        return learner_part(recipe, device_bytes)

    return engine_shares(recipe, visible, part_of_learner) if recipe.launcher.kind == "local" else {}


@click.command(hidden=True)
@click.argument("recipe")
@overrides_argument
@start_options
def prepare(
    recipe: str,
    overrides: tuple[str, ...],
    start: StartOptions,
) -> None:
    """Make the run's directory, as `run` does before it starts anything."""
    begins = start.checked()
    from headway.deploy.recipe.resolve import load_recipe

    loaded = load_recipe(recipe, overrides)
    from headway.deploy.launch.local_run import LocalRun
    from headway.deploy.terminal import Terminal

    LocalRun(loaded, recipe, overrides, Terminal(), begins).prepare()


@contextmanager
def printing_launcher(as_json: bool) -> "Iterator[Launcher]":
    """Yield a launcher whose commands are printed: each as it is given, or all at the end as one JSON object."""
    from headway.deploy.launch.base import Command, PrintedLauncher, as_builtins, as_text

    if not as_json:
        yield PrintedLauncher(lambda command: say(as_text(command)))
        return
    commands: list[Command] = []
    yield PrintedLauncher(commands.append)
    say_json({"commands": [as_builtins(command) for command in commands]})


@click.group(no_args_is_help=True)
def ray() -> None:
    """Put a run on a Ray cluster."""


@ray.command()
@run_arguments
@click.option(
    "--address",
    default="local",
    show_default=True,
    metavar="ADDRESS",
    help="local: start a Ray on this machine; auto: the Ray that runs here; or HOST:PORT of a cluster's head.",
)
def up(
    recipe: str,
    overrides: tuple[str, ...],
    address: str,
    start: StartOptions,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Run RECIPE with its learner and workers on the nodes of a Ray cluster.

    It is `headway run` with launcher.kind=ray: this process supervises the others, which Ray places. A worker whose
    node is gone starts again on another one. The run's directory lies on a file system that all nodes share.
    """
    chosen = ("launcher.kind=ray", f"launcher.options.address={json.dumps(address)}")
    return execute(recipe, (*overrides, *chosen), start.checked(), dry_run=dry_run, as_json=as_json)


@click.group()
def launch() -> None:
    """Write the files with which a cluster starts a run. Nothing is started."""


output_option = click.option(
    "--output", type=click.Path(path_type=Path, file_okay=False), required=True, help="Directory for the files."
)
pool_option = click.option(
    "--pool",
    "pools",
    multiple=True,
    metavar="[NAME=]N",
    help="Start N workers of the pool; without NAME, of the main one. Repeat it for more.  [default: the recipe's]",
)


@launch.command()
@click.argument("recipe")
@overrides_argument
@output_option
@pool_option
@click.option("--nodes", type=click.IntRange(1, 1024), default=1, show_default=True, help="Nodes of the learner.")
@click.option("--time", default="1-00:00:00", show_default=True, help="Slurm's time limit of every job.")
@click.option(
    "--grace",
    "grace_s",
    type=click.IntRange(30, 3600),
    default=120,
    show_default=True,
    help="Seconds before the time limit at which a job drains.",
)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="The broker's.  [default: a free one]")
@click.option(
    "--sbatch",
    multiple=True,
    metavar="[ROLE:]OPTION",
    help="An option of sbatch, such as --partition=cpu or learner:--partition=gpu. Repeat it for more.",
)
@click.option("--dry-run", is_flag=True, help="Print the scripts; write nothing.")
@json_option
def slurm(
    recipe: str,
    overrides: tuple[str, ...],
    output: Path,
    pools: tuple[str, ...],
    nodes: int,
    time: str,
    grace_s: int,
    port: int,
    sbatch: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write batch scripts for Slurm: one for each role, and submit.sh, which submits them all.

    The directory must have the same path on every node, and only you may read it: the passwords are in it. Jobs drain
    before their time limit, go back into the queue and go on.
    """
    from headway.deploy.launch.slurm_scripts import SlurmOptions, slurm_scripts, write_slurm_scripts
    from headway.deploy.recipe.resolve import load_recipe

    loaded = load_recipe(recipe, overrides)
    options = SlurmOptions(nodes=nodes, pools=_counts(pools), time=time, grace_s=grace_s, port=port, sbatch=sbatch)
    if dry_run:
        _print_files(slurm_scripts(loaded, output, options), "# {}", as_json)
        return
    written = write_slurm_scripts(loaded, output, options)
    if as_json:
        say_json({"directory": str(output.resolve()), "files": [str(path) for path in written]})
        return
    say(f"Written to {output}: {', '.join(path.name for path in written)}. Start the run with {written[0]}.")


@launch.command()
@click.argument("recipe")
@overrides_argument
@output_option
@pool_option
@click.option(
    "--image", default="headway", show_default=True, metavar="IMAGE", help="Headway's image, as REPOSITORY[:TAG]."
)
@click.option("--namespace", default="", help="Of all that is made there.  [default: the one that kubectl uses]")
@click.option(
    "--keda",
    multiple=True,
    metavar="[NAME=]MOST",
    help="Let KEDA scale the pool by the rule of `headway autoscale`, up to MOST workers. Repeat it for more.",
)
@click.option("--ray", "has_ray", is_flag=True, help="Run `headway ray up` as a RayJob of KubeRay.")
@click.option("--dry-run", is_flag=True, help="Print the files, except secrets; write nothing.")
@json_option
def kubernetes(
    recipe: str,
    overrides: tuple[str, ...],
    output: Path,
    pools: tuple[str, ...],
    image: str,
    namespace: str,
    keda: tuple[str, ...],
    has_ray: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write manifests for Kubernetes: `kubectl apply -k` of the directory starts the run.

    Only you may read the directory's secrets: passwords, and the key of the broker's certificate.
    """
    from headway.deploy.launch.kubernetes_manifests import KubernetesOptions, manifests, write_manifests
    from headway.deploy.recipe.resolve import load_recipe

    loaded = load_recipe(recipe, overrides)
    options = KubernetesOptions(
        image=image, namespace=namespace, pools=_counts(pools), keda=_counts(keda, "--keda"), has_ray=has_ray
    )
    if dry_run:
        _print_files(manifests(loaded, options), "--- # {}", as_json)
        return
    written = write_manifests(loaded, output, options)
    if as_json:
        say_json({"directory": str(output.resolve()), "files": [str(path.resolve()) for path in written]})
        return
    say(f"Written to {output}: {len(written)} files, and secrets. Start the run with: kubectl apply -k {output}")


def _print_files(texts: Mapping[str, str], head: str, as_json: bool) -> None:
    """Print files that a command would write, each below a head with its name."""
    if as_json:
        say_json({"files": texts})
        return
    for name, text in texts.items():
        say(f"{head.format(name)}\n{text.rstrip()}")


def _counts(pools: tuple[str, ...], option: str = "--pool") -> dict[str, int]:
    """Return the number of workers of each pool that the option names. Raises UsageError."""
    from headway.deploy.recipe.pools import MAIN

    counts = {}
    for pool in pools:
        name, _, count = pool.rpartition("=")
        if not count.isdecimal() or not 1 <= int(count) <= 10_000:
            raise click.UsageError(f"{option} {pool}: give a number of workers from 1 to 10000, such as 8 or NAME=8.")
        counts[name or MAIN] = int(count)
    return counts
