"""The commands that take a trained model: a checkpoint, the model of a stage, or a run's newest or best checkpoint."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .options import F, json_option, overrides_argument

if TYPE_CHECKING:
    from headway.deploy.roles.export import Dtype

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
@click.option("--adapter", is_flag=True, help="The adapter alone, as a PEFT directory.  [default: merged]")
@click.option("--force", is_flag=True, help="Replace a model that is there.")
@click.option(
    "--check/--no-check", default=True, help="Compare logprobs (or scores) with the learner's backend.  [default: do]"
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="For the check.")
@json_option
def export(
    model: str,
    step: int | None,
    best: bool,
    out: Path,
    dtype: str | None,
    adapter: bool,
    force: bool,
    check: bool,
    device: str,
    as_json: bool,
) -> None:
    """Write a model that `vllm serve` and transformers load.

    MODEL is a checkpoint's directory, or a run's directory or name: then its newest whole checkpoint. The files are
    safetensors, and the model's other files as they were. They are kept only if transformers computes the same logprobs
    from them as the learner's backend from the checkpoint; that takes memory for the model and its optimizer in one
    process. The directory appears whole or not at all.
    """
    chosen = _step(step, best)
    from headway.deploy.cli.models import write_export

    kept = DTYPES[dtype] if dtype else None
    write_export(
        model,
        chosen,
        out,
        dtype=kept,
        is_checked=check,
        is_forced=force,
        device=device,
        is_adapter=adapter,
        as_json=as_json,
    )


def _shard(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, int]:
    """Return I and N of "I/N". Raises BadParameter."""
    number, _, count = value.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise click.BadParameter(f"{value!r} is given; expected I/N such as 2/4.", context, parameter)
    return int(number), int(count)


@click.command()
@_model
@click.argument("prompts", type=click.Path(path_type=Path))
@overrides_argument
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The file of answers: JSON lines.")
@click.option("--samples", type=click.IntRange(1, 4096), default=1, show_default=True, help="Responses to each prompt.")
@click.option("--temperature", type=click.FloatRange(0), help="0: greedy.  [default: sampling.temperature]")
@click.option("--seed", type=int, default=0, show_default=True, help="Another one gives other responses.")
@click.option("--shard", default="1/1", callback=_shard, metavar="I/N", help="Every N-th prompt alone, from the I-th.")
@click.option("--workers", type=click.IntRange(0, 1024), help="Worker processes on this machine.  [default: none]")
@click.option("--broker", metavar="URL", help="A server where workers of other machines join, with `headway workers`.")
@click.option("--run", help="The name by which they join.  [default: by --out]")
@json_option
def generate(
    model: str,
    prompts: Path,
    overrides: tuple[str, ...],
    step: int | None,
    best: bool,
    out: Path,
    samples: int,
    temperature: float | None,
    seed: int,
    shard: tuple[int, int],
    workers: int | None,
    broker: str | None,
    run: str | None,
    as_json: bool,
) -> int:
    """Let a model answer a file of prompts.

    MODEL is the directory of a model, or a run's directory or name: then its newest whole checkpoint. PROMPTS is a
    JSONL or Parquet file with a text or a list of messages in `prompt`. One engine in this process generates, by the
    run's engine.* and sampling.*, or by defaults for a model of no run; overrides change both. --out gets a line for
    each prompt as soon as it is done, and has all in the order of PROMPTS in the end. If the process ends before, run
    the same command again: it generates what is missing.

    With --workers so many processes share the prompts, each with an engine of its own; one that dies is replaced, and
    its prompts go to others. With --broker workers of other machines may join and leave, too. The answers are the same,
    on engines that honour seeds.
    """
    chosen = _step(step, best)
    if workers is None and broker:
        workers = 0
    if workers is None and run:
        raise click.UsageError("--run needs --workers or --broker.")
    if workers == 0 and not broker:
        raise click.UsageError("--workers 0 needs --broker: no worker would generate.")
    if workers is not None and shard != (1, 1):
        raise click.UsageError("--shard and --workers exclude each other: workers share the prompts themselves.")
    from headway.deploy.cli.models import answer_prompts

    return answer_prompts(
        model, chosen, prompts, out, overrides, samples=samples, temperature=temperature, seed=seed, shard=shard,
        workers=workers, broker=broker, run=run, as_json=as_json,
    )  # fmt: skip


@click.command()
@_model
@overrides_argument
@click.option("--system", help="The system message.  [default: prompts.system_prompt of the run]")
@click.option("--temperature", type=click.FloatRange(0), help="0: greedy.  [default: sampling.temperature]")
@click.option("--json", "as_json", is_flag=True, help="Each answer as one JSON object in a line.")
def chat(
    model: str,
    overrides: tuple[str, ...],
    step: int | None,
    best: bool,
    system: str | None,
    temperature: float | None,
    as_json: bool,
) -> None:
    """Talk with a model in this terminal.

    MODEL is the directory of a model, or a run's directory or name: then its newest whole checkpoint. Each line is a
    message; the answer appears as it is generated. Ctrl-C stops an answer, Ctrl-D leaves. The input may also be a file
    or a pipe. A model without a chat template continues each line. The run's engine.* and sampling.* apply, or defaults
    for a model of no run; overrides change both.
    """
    chosen = _step(step, best)
    from headway.deploy.cli.chat import converse

    converse(model, chosen, overrides, system=system, temperature=temperature, as_json=as_json)
