"""The commands that take a trained model: a checkpoint, the model of a stage, or a run's newest or best checkpoint.

`headway chat` takes each line as a message, and prints the answer as it is generated.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headway.broker.errors import ConfigError
from headway.deploy.printing import complain, say, say_json

from .options import F, json_option, overrides_argument

if TYPE_CHECKING:
    from headway.deploy.roles.batch_inference import Generated, ResponseSampler
    from headway.deploy.roles.chat import Chat, Reply
    from headway.deploy.roles.export import Dtype
    from headway.deploy.roles.trained_model import GenerationSettings, TrainedModel


DTYPES: "dict[str, Dtype]" = {"bf16": "bfloat16", "fp32": "float32"}


def _model_options(command: F) -> F:
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
@_model_options
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
    from transformers.utils.logging import disable_progress_bar

    from headway.deploy.roles.export import export_model
    from headway.deploy.roles.trained_model import find_trained

    disable_progress_bar()
    done = export_model(
        find_trained(model, chosen),
        out,
        dtype=DTYPES[dtype] if dtype else None,
        is_checked=check,
        is_forced=force,
        device=device,
        is_adapter=adapter,
    )
    if as_json:
        say_json(done)
        return
    size = f"{done.parameters:,} parameters in {done.dtype}, {done.bytes / 1e6:,.1f} MB"
    say(f"{done.directory} holds the {'adapter' if adapter else 'model'} of {done.checkpoint}: {size}.")
    if done.quantized != "none":
        say(
            f"It was trained beside a base in {done.quantized}: "
            + ("load the base in that format for it." if adapter else "its weights are those, made dense again.")
        )
    if (compared := done.check) is not None:
        say(
            f"The {compared.compared} of {compared.tokens} tokens differ from those of the backend {compared.backend}"
            f" by {compared.mean_difference:.2g} on average, and by {compared.largest_difference:.2g} at most."
        )


def _shard(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, int]:
    """Return I and N of "I/N". Raises BadParameter."""
    number, _, count = value.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise click.BadParameter(f"{value!r} is given; expected I/N such as 2/4.", context, parameter)
    return int(number), int(count)


@click.command()
@_model_options
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
def generate(as_json: bool, step: int | None, best: bool, **options: Any) -> int:
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
    request = GenerateRequest(step=_step(step, best), **options).checked()
    done = request.answered()
    if done is None:
        say(f"Stopped. What is done is in {request.out}; the same command goes on.", to_stderr=True)
        return INTERRUPTED
    if as_json:
        say_json(done)
        return 0
    before = f" {done.found} of them were there before." if done.found else ""
    say(
        f"{done.out} holds the answers of {done.model} to {done.prompts} prompts.{before} {done.responses} responses"
        f" with {done.response_tokens:,} tokens were generated."
    )
    return 0


@click.command()
@_model_options
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
    from transformers.utils.logging import disable_progress_bar

    from headway.deploy.roles.chat import Chat
    from headway.deploy.roles.trained_model import GenerationSettings, find_trained, settings_of

    disable_progress_bar()
    found = find_trained(model, chosen)
    if system is None:
        system = "" if found.recipe is None else found.recipe.prompts.system_prompt
    with Chat(found, settings_of(found, overrides, temperature, GenerationSettings), system) as opened:
        if not opened.has_template:
            complain("The model has no chat template: it continues each line, and remembers none.")
        if sys.stdin.isatty():
            complain(f"{found.path} listens. Ctrl-C stops an answer, Ctrl-D leaves.")
        for message in _messages():
            _answer(opened, message, as_json)


INTERRUPTED = 130
"""The exit code after Ctrl-C."""
REPORT_S = 10.0
"""Seconds between two lines about a batch inference that goes on."""


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """What `headway generate` is asked for."""

    model: str
    step: int | str | None
    """Which checkpoint of a run, as `find_trained` takes it."""
    prompts: Path
    out: Path
    overrides: Sequence[str]
    samples: int
    temperature: float | None
    seed: int
    shard: tuple[int, int]
    workers: int | None
    """Processes on this machine; None: an engine in this one."""
    broker: str | None
    run: str | None

    def checked(self) -> "GenerateRequest":
        """Return the request, with no workers on this machine where there is a broker. Raises UsageError for options
        that exclude or need each other."""
        workers = 0 if self.workers is None and self.broker else self.workers
        if workers is None and self.run:
            raise click.UsageError("--run needs --workers or --broker.")
        if workers == 0 and not self.broker:
            raise click.UsageError("--workers 0 needs --broker: no worker would generate.")
        if workers is not None and self.shard != (1, 1):
            raise click.UsageError("--shard and --workers exclude each other: workers share the prompts themselves.")
        return replace(self, workers=workers)

    def answered(self) -> "Generated | None":
        """Let the model answer the prompts, and return what was done; None where a signal has stopped it."""
        from transformers.utils.logging import disable_progress_bar

        from headway.deploy.roles.batch_inference import EngineSampler
        from headway.deploy.roles.trained_model import GenerationSettings, PoolSettings, find_trained, settings_of

        disable_progress_bar()
        found = find_trained(self.model, self.step)
        if self.workers is None:
            settings = settings_of(found, self.overrides, self.temperature, GenerationSettings)
            return self._generated(found, settings, EngineSampler(model=found, settings=settings, seed=self.seed))
        from headway.deploy.roles.batch_inference_workers import (
            GenerationPool,
            WorkerSampler,
            generation_recipe,
            run_name,
        )

        for_pool = settings_of(found, self.overrides, self.temperature, PoolSettings)
        name = self.run or run_name(self.out)
        recipe = generation_recipe(found, for_pool, run=name, samples=self.samples, seed=self.seed)
        logs = self.out.with_name(f"{self.out.name}.logs")
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        pool = GenerationPool(recipe=recipe, count=self.workers, url=self.broker, logs=logs, devices=devices)
        return pool.run(lambda url: self._generated(found, for_pool, WorkerSampler(url=url, recipe=recipe)))

    def _generated(
        self, model: "TrainedModel", settings: "GenerationSettings", sampler: "ResponseSampler"
    ) -> "Generated":
        from headway.deploy.roles.batch_inference import BatchInference, Shard

        return BatchInference(
            model=model,
            prompts=self.prompts,
            out=self.out,
            settings=settings,
            sampler=sampler,
            samples=self.samples,
            seed=self.seed,
            shard=Shard(number=self.shard[0], count=self.shard[1]),
            report=_progress_report(),
        ).run()


def _progress_report() -> Callable[[int, int], None]:
    """Return a function that says on stderr how many prompts are done, but not after every one."""
    said_s = time.monotonic()

    def report(done: int, wanted: int) -> None:
        nonlocal said_s
        if time.monotonic() - said_s >= REPORT_S:
            said_s = time.monotonic()
            say(f"{done} of {wanted} prompts are done", to_stderr=True)

    return report


PROMPT = "> "


def _answer(chat: "Chat", message: str, as_json: bool) -> None:
    """Print the answer to a message, or why there is none."""
    try:
        reply = chat.say(message) if as_json else chat.say(message, lambda text: say(text, ends_line=False))
    except ConfigError as error:
        complain(f"{error}")
        return
    if reply.finish_reason == "interrupted" and not sys.stdin.isatty():
        raise KeyboardInterrupt  # nobody is there who would go on
    if as_json:
        say_json(reply, in_one_line=True)
        return
    say(" [stopped]" if reply.finish_reason == "interrupted" else _cut(reply))
    if reply.forgotten:
        complain(f"The {reply.forgotten} oldest messages are forgotten: the model has no room for more.")


def _cut(reply: "Reply") -> str:
    return " [cut at its longest length]" if reply.finish_reason == "length" else ""


def _messages() -> Iterator[str]:
    """Yield the lines of the input that are not empty. At a terminal, Ctrl-C begins a new line."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401 - it lets `input` edit its line
    while True:
        try:
            line = input(PROMPT) if is_terminal else sys.stdin.readline()
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            say("")
            continue
        except EOFError:
            say("")
            return
        if not is_terminal and not line:
            return
        if line.strip():
            yield line.strip()
