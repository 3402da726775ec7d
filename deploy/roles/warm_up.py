"""The warm-up role: the learner's supervised stage, gated on a pass rate that the workers' room measures."""

from collections.abc import Iterable
from pathlib import Path
from typing import Self

import msgspec
import torch
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from deploy.recipe.recipe import Recipe
from deploy.terminal import Terminal
from learner.data.prompts import open_prompts
from learner.data.prompts.rendering import Renderer
from learner.models.model import load_config, load_tokenizer, model_files
from learner.objective.composition import check_algorithm
from learner.ranks import Ranks
from learner.stages.sft import SftProgress, SftStage, WarmUpError

from .backend import recipe_backend
from .evaluation import Evaluator
from .stop_request import StopRequest

LINE_EVERY_STEPS = 50


class SftOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What the warm-up left behind."""

    steps: int
    loss: float
    pass_rate: float
    """Of the model as it was saved, on the held-out prompts."""


def fine_tune(recipe: Recipe, output: Path, *, console: Terminal) -> SftOutcome:
    """Run all phases and write a model for `from_pretrained` to `output`. Raises WarmUpError when it is stopped."""
    check_algorithm(recipe.algorithm)  # what follows the warm-up must not fail for a misspelt option
    backend = recipe_backend(recipe)
    ranks = Ranks.of(backend)
    tokenizer = load_tokenizer(recipe.model)
    prompts = open_prompts(recipe.prompts, tokenizer, recipe.run.seed)
    prompts.check()
    gates = [phase.gate_prompts for phase in recipe.sft.phases if phase.until_pass_rate]
    held_out = prompts.held_out(max(*gates, recipe.evaluation.prompts, 0))
    with (
        Evaluator(recipe, model_files(load_config(recipe.model), tokenizer), held_out) as evaluator,
        ProgressBars(console) as bars,
    ):

        def gate(tensors: Iterable[tuple[str, torch.Tensor]], count: int | None = None) -> float:
            pass_rate = evaluator.measure(tensors, count).pass_rate if ranks.is_first else 0.0
            for _ in tensors:  # gathering is collective
                pass
            return ranks.sum([pass_rate])[0]

        stage = SftStage(
            backend=backend,
            ranks=ranks,
            tokenizer=tokenizer,
            renderer=Renderer(tokenizer, recipe.prompts.system_prompt),
            config=recipe.sft,
            gate=gate,
            seed=recipe.run.seed,
            micro_batch_tokens=recipe.learner.micro_batch_tokens,
            report=bars.show,
            should_stop=StopRequest(),
        )
        if not stage.run():
            raise WarmUpError("The warm-up was stopped before its end; it starts over next time.")
        outcome = SftOutcome(steps=bars.steps, loss=bars.loss, pass_rate=gate(backend.named_tensors()))
    backend.save(output)
    return outcome


class ProgressBars:
    """One bar a phase on a terminal, a line now and then elsewhere."""

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
        self._tasks: dict[int, TaskID] = {}
        self.steps = 0
        self.loss = 0.0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, progress: SftProgress) -> None:
        """After every step."""
        self.steps += 1
        self.loss = progress.loss
        passed = "" if progress.pass_rate is None else f"  pass rate {progress.pass_rate:.2f}"
        name = f"warm-up {progress.phase}/{progress.phases}"
        if progress.phase not in self._tasks:
            self._tasks[progress.phase] = self._progress.add_task(
                name, total=progress.max_steps, loss=progress.loss, passed=passed
            )
        self._progress.update(self._tasks[progress.phase], completed=progress.step, loss=progress.loss, passed=passed)
        if not self._console.is_terminal and progress.step % LINE_EVERY_STEPS == 0:
            self._console.print(f"{name}: step {progress.step}/{progress.max_steps}  loss {progress.loss:.3f}{passed}")
