"""The role of a stage without workers. It gives the stage pass rates that the workers' engine and rewards measure."""

import functools
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self, cast

import msgspec
import torch
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from transformers import PreTrainedTokenizerBase

from headway.broker.errors import ConfigError
from headway.broker.schema import Prompt
from headway.deploy.observe.sinks import open_sinks
from headway.deploy.observe.sinks.base import SinkRun, Sinks
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.recipe.stage_graph import references
from headway.deploy.run.events import StageEvent
from headway.deploy.run.figures import finite
from headway.deploy.run.resumable_keys import stage_binding
from headway.deploy.run.stage_output import record_of, starting_at, tracker_identity
from headway.deploy.terminal import Terminal
from headway.learner.backends.base import Backend
from headway.learner.config import StageConfig
from headway.learner.data.prompts import open_prompts
from headway.learner.data.prompts.rendering import Renderer
from headway.learner.models.model_files import model_files
from headway.learner.models.pretrained import load_tokenizer
from headway.learner.objective.composition import check_algorithm
from headway.learner.objective.update import prefix_sharing_of
from headway.learner.ranks import Ranks
from headway.learner.stages import base, check_stages, open_stage
from headway.learner.stages.base import Gate, Stage, StageError, StageParts
from headway.learner.stages.registry import leaves_policy
from headway.learner.stages.stage_checkpoints import Binding, StageCheckpoints, check_binding

from .held_out_evaluation import Evaluator
from .recipe_backends import beside_policy, recipe_backend, recipe_cost, recipe_scores
from .stop_request import StopRequest

LINE_EVERY_STEPS = 50


class StageOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a finished stage."""

    steps: int
    loss: float | None
    pass_rate: float | None
    """The pass rate of the saved model on the held-out prompts; None if the recipe has none."""


def fine_tune(recipe: Recipe, output: Path, *, console: Terminal, number: int = 0) -> StageOutcome:
    """Run this stage of the recipe from the model of the stages before it, and write a model for `from_pretrained`.

    The model goes to the directory `output`. A stopped stage continues where it was. Raises StageError when it is
    stopped.
    """
    check_algorithm(recipe.algorithm)  # a later role must not fail for a misspelt option when this one is done
    check_stages(recipe.plan)
    binding = stage_binding(recipe, number)
    check_binding(output, binding)  # before a model is loaded
    recipe = starting_at(recipe, number)
    config = recipe.plan[number]
    # A stage takes the kind of model that it names, whatever the type of `parts.backend`.
    backend = recipe_backend(recipe) if leaves_policy(config) else cast(Backend, recipe_scores(recipe))
    ranks = Ranks.of(backend)
    tokenizer = load_tokenizer(recipe.model)
    held_out = _held_out(recipe, config, tokenizer)
    run = _sink_run(recipe, config, output, binding) if ranks.is_first else None
    with _gate(recipe, held_out, ranks) as gate, _reported(recipe, run, console) as report:
        parts = StageParts(
            backend=backend,
            ranks=ranks,
            tokenizer=tokenizer,
            renderer=Renderer(tokenizer, recipe.prompts.system_prompt),
            checkpoints=StageCheckpoints(backend, ranks, output, binding, every_s=recipe.checkpoint.stage_every_s),
            seed=recipe.run.seed,
            micro_batch_tokens=recipe.learner.micro_batch_tokens,
            prefix_sharing=prefix_sharing_of(recipe.learner),
            cost=recipe_cost(recipe),
            gate=gate,
            open_model=functools.partial(beside_policy, recipe),
            report=report.show,
            should_stop=StopRequest(),
        )
        stage = open_stage(config, parts, f"stages[{number}]")
        report.stage = stage
        if not stage.run():
            raise StageError(f"Stage {config.name} was stopped before its end; it goes on from here next time.")
        pass_rate = gate(backend.named_tensors(), len(held_out)) if held_out else None
    stage.save()
    return StageOutcome(steps=stage.metrics.steps, loss=stage.metrics.loss, pass_rate=pass_rate)


def _held_out(recipe: Recipe, stage: StageConfig, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Return the most held-out prompts that a gate or the final measurement asks for; none of a recipe without
    prompts, for a model that generates nothing, or while rewards wait for the model of a later stage."""
    rewards = references(msgspec.to_builtins(recipe.rewards))
    if not recipe.has_prompts or not leaves_policy(stage) or any(rewards):
        return []
    prompts = open_prompts(recipe.prompts, tokenizer, recipe.run.seed)
    prompts.check(recipe.most_prompt_tokens)
    gates = [phase.gate_prompts for phase in stage.phases if phase.until_pass_rate]
    return prompts.held_out(max([recipe.evaluation.prompts, *gates]), recipe.most_prompt_tokens)


def _sink_run(recipe: Recipe, stage: StageConfig, output: Path, binding: Binding) -> SinkRun:
    """Return the stage as a run of its own, whose steps count for themselves."""
    made_from = hashlib.blake2b(msgspec.json.encode(binding, order="deterministic"), digest_size=8).hexdigest()
    return SinkRun(
        name=f"{recipe.run.name}-{stage.name}",
        identity=tracker_identity(output, made_from),
        directory=recipe.run_directory,
        stage=output.name,
        record=record_of(output),
    )


@contextmanager
def _reported(recipe: Recipe, run: SinkRun | None, console: Terminal) -> Iterator["_Report"]:
    """Yield what shows each step of the stage, and gives it to the recipe's sinks if `run` is given."""
    with ProgressBars(console) as bars, ExitStack() as stack:
        sinks = stack.enter_context(open_sinks(recipe.metrics, run)) if run is not None else None
        yield _Report(bars, sinks)


class _Report:
    """Shows each step of a stage, and gives it to sinks, if this rank has them."""

    def __init__(self, bars: "ProgressBars", sinks: Sinks | None) -> None:
        self._bars = bars
        self._sinks = sinks
        self.stage: Stage | None = None
        """The opened stage, set before its first step."""

    def show(self, progress: base.Progress) -> None:
        """Called after every step."""
        self._bars.show(progress)
        if self._sinks is not None and self.stage is not None:
            self._sinks.write(stage_event(progress, self.stage.metrics.steps))


def stage_event(progress: base.Progress, steps: int) -> StageEvent:
    """Return the event of a stage's step, the last one of `steps`."""
    return StageEvent(
        steps=steps,
        part=progress.part,
        loss=finite(progress.loss),
        pass_rate=progress.pass_rate,
        metrics={name: finite(value) for name, value in progress.metrics.items()},
    )


@contextmanager
def _gate(recipe: Recipe, held_out: Sequence[Prompt], ranks: Ranks) -> Iterator[Gate]:
    """Yield a function that measures the pass rate of given tensors on the first so many of the held-out prompts."""
    if not held_out:
        yield _no_pass_rate
        return
    files = model_files(recipe.model)
    with Evaluator(recipe, files, held_out) as evaluator:

        def gate(tensors: Iterable[tuple[str, torch.Tensor]], count: int) -> float:
            pass_rate = evaluator.measure(tensors, count).pass_rate if ranks.is_first else 0.0
            for _ in tensors:  # gathering is collective
                pass
            return ranks.sum([pass_rate])[0]

        yield gate


def _no_pass_rate(tensors: Iterable[tuple[str, torch.Tensor]], count: int) -> float:
    raise ConfigError(
        "The stage measures a pass rate, and the recipe has no held-out prompts, or no rewards before a later stage"
        " leaves their model. Give the recipe prompts and other rewards, and evaluation.prompts above 0."
    )


class ProgressBars:
    """Shows one bar for each part on a terminal, and a line now and then elsewhere."""

    def __init__(self, console: Terminal) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("step {task.completed}/{task.total}  loss {task.fields[loss]:.3f}{task.fields[passed]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, progress: base.Progress) -> None:
        """Show the progress. Called after every step."""
        passed = "" if progress.pass_rate is None else f"  pass rate {progress.pass_rate:.2f}"
        name = progress.part
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(
                name, total=progress.max_steps, loss=progress.loss, passed=passed
            )
        self._progress.update(self._tasks[name], completed=progress.step, loss=progress.loss, passed=passed)
        if not self._console.is_terminal and progress.step % LINE_EVERY_STEPS == 0:
            self._console.print(f"{name}: step {progress.step}/{progress.max_steps}  loss {progress.loss:.3f}{passed}")
