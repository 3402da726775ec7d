"""`headway launch`: files with which a cluster's own scheduler starts a run."""

from collections.abc import Mapping
from pathlib import Path

import click

from headway.deploy.printing import say, say_json

from .options import json_option, overrides_argument


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
