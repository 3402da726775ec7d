"""The commands that take a trained model: a checkpoint, the model of a stage, or a run's newest or best checkpoint."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .options import F, json_option

if TYPE_CHECKING:
    from deploy.roles.export import Dtype

DTYPES: "dict[str, Dtype]" = {"bf16": "bfloat16", "fp32": "float32"}


def _model(command: F) -> F:
    """Add MODEL, --step and --best."""
    for decorate in (
        click.option("--best", is_flag=True, help="The run's best checkpoint: checkpoint.best."),
        click.option(
            "--step", type=click.IntRange(min=0), help="The run's checkpoint at this step.  [default: newest]"
        ),
        click.argument("model"),
    ):
        command = decorate(command)
    return command


def _step(step: int | None, best: bool) -> int | str | None:
    """Return which checkpoint of a run is meant, as `find_trained` takes it. Raises UsageError."""
    if step is not None and best:
        raise click.UsageError("--step and --best exclude each other.")
    return "best" if best else step


@click.command()
@_model
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The directory to make.")
@click.option("--dtype", type=click.Choice([*DTYPES]), help="Number format of the weights.  [default: the model's own]")
@click.option("--force", is_flag=True, help="Replace a model that is there.")
@click.option("--check/--no-check", default=True, help="Compare logprobs with the learner's backend.  [default: do]")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="For the check.")
@json_option
def export(
    model: str,
    step: int | None,
    best: bool,
    out: Path,
    dtype: str | None,
    force: bool,
    check: bool,
    device: str,
    as_json: bool,
) -> None:
    """Write a model that `vllm serve` and transformers load.

    MODEL is a checkpoint's directory, or a run's directory or name: then its newest whole checkpoint. The files are
    safetensors, config, generation config, and the tokenizer with its chat template. They are kept only if transformers
    computes the same logprobs from them as the learner's backend from the checkpoint; that takes memory for the model
    and its optimizer in one process. The directory appears whole or not at all.
    """
    chosen = _step(step, best)
    from deploy.cli.models import export

    kept = DTYPES[dtype] if dtype else None
    export(model, chosen, out, dtype=kept, is_checked=check, is_forced=force, device=device, as_json=as_json)
