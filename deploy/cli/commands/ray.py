"""`headway ray`: a run whose processes Ray places."""

import json

import click

from .options import of_a_run, rewind_of


@click.group(no_args_is_help=True)
def ray() -> None:
    """Put a run on a Ray cluster."""


@ray.command()
@of_a_run
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
    resume: bool,
    overwrite: bool,
    force: bool,
    rewind_to: int | None,
    regenerate: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Run RECIPE with its learner and workers on the nodes of a Ray cluster.

    It is `headway run` with launcher.kind=ray: this process supervises the others, which Ray places. A worker whose
    node is gone starts again on another one. The run's directory lies on a file system that all nodes share.
    """
    rewind = rewind_of(resume, overwrite, rewind_to, regenerate)
    from .run import execute

    chosen = ("launcher.kind=ray", f"launcher.options.address={json.dumps(address)}")
    return execute(
        recipe, (*overrides, *chosen), resume, overwrite, rewind, is_forced=force, dry_run=dry_run, as_json=as_json
    )
