"""The pass rate on held-out prompts, measured in the learner's process with the workers' rewards and an engine.

Between evaluations the engine sleeps, and the learner has the memory.
"""

import asyncio
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import msgspec

from headway.broker.client.broker import open_broker
from headway.broker.schema import Prompt, WeightVersion
from headway.broker.schema.weights import ModelFiles
from headway.deploy.recipe.operators import roots_of
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.recipe.scorers import scorers_of

from .asked import asking, holding

if TYPE_CHECKING:
    import torch

    from headway.rollout_workers.evaluate import EvalResult


class Evaluator:
    """Measures pass rates with an embedded engine, whatever engine the workers run: small, on this host, used now and
    then."""

    def __init__(self, recipe: Recipe, model: ModelFiles | Path, prompts: Sequence[Prompt], *, url: str = "") -> None:
        """`model`: its files without weights, or a directory with weights, which are measured unless others are
        given. `url`: the broker of the run, whose scorers are asked for the scores of reward models; empty: this
        process loads them."""
        from transformers.utils.logging import disable_progress_bar

        from headway.rollout_workers.decoding import load_decoding
        from headway.rollout_workers.engines import open_engine
        from headway.rollout_workers.environments import open_environment
        from headway.rollout_workers.model_files import write_model
        from headway.rollout_workers.rewards import open_reward

        from .engine import own_decoding

        disable_progress_bar()
        self._recipe = recipe = _in_one_process(recipe)
        self._prompts = prompts
        self._swaps = 0
        self._directory = tempfile.TemporaryDirectory(prefix="headway-eval-")
        self._runner = asyncio.Runner()
        self._has_weights = not isinstance(model, ModelFiles)
        if isinstance(model, ModelFiles):
            model_dir = write_model(model, Path(self._directory.name) / "model")
            self._decoding = load_decoding(model_dir, model.end_tokens, recipe.sampling.keep_special_tokens)
        else:
            model_dir = model
            own = msgspec.structs.replace(recipe.model, path=str(model), random=None)
            self._decoding = own_decoding(own, recipe.sampling)
        config = msgspec.structs.replace(recipe.engine, kind="embedded", options={})
        self._engine = open_engine(config, model_dir, seed=recipe.run.seed)
        if not self._has_weights:
            self._runner.run(self._engine.sleep())
        self._broker = self._runner.run(open_broker(url, recipe.run.name)) if url and scorers_of(recipe) else None
        open_scorer = holding(recipe) if self._broker is None else asking(self._broker)
        self._scorer = self._runner.run(open_reward(recipe.rewards, roots_of(recipe), open_scorer))
        self._environment = self._runner.run(open_environment(recipe.environment, roots_of(recipe)))

    def measure(
        self, tensors: Iterable[tuple[str, "torch.Tensor"]] | None = None, prompts: int | None = None
    ) -> "EvalResult":
        """Measure the samples of all prompts, or of the first `prompts`, under these weights if some are given."""
        return self._runner.run(self._measure(None if tensors is None else list(tensors), self._prompts[:prompts]))

    def close(self) -> None:
        """Stop the engine and remove its files."""
        self._runner.run(self._close())
        self._runner.close()
        self._directory.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _measure(
        self, tensors: "list[tuple[str, torch.Tensor]] | None", prompts: Sequence[Prompt]
    ) -> "EvalResult":
        from headway.rollout_workers.evaluate import evaluate
        from headway.rollout_workers.samples.held_out import evaluation_sampling

        if tensors is not None:
            self._swaps += 1
            await self._engine.wake()
            await self._engine.swap_weights(WeightVersion(0, self._swaps), tensors)
        result = await evaluate(
            self._engine,
            prompts,
            self._scorer,
            self._decoding,
            evaluation_sampling(self._recipe.sampling, self._recipe.evaluation),
            self._recipe.evaluation.pass_reward,
            self._environment,
            samples=self._recipe.evaluation.samples,
        )
        if tensors is not None:  # the next measurement brings its own weights
            await self._engine.sleep()
        return result

    async def _close(self) -> None:
        await self._engine.close()
        await self._environment.close()
        await self._scorer.close()
        if self._broker is not None:
            await self._broker.close()


def _in_one_process(recipe: Recipe) -> Recipe:
    """Return the recipe with the learner's threads for engine and reward models: torch has one number for all threads
    of a process, and the last that is set counts."""
    threads = recipe.learner.threads
    return msgspec.structs.replace(
        recipe,
        engine=msgspec.structs.replace(recipe.engine, threads=threads),
        scorers=msgspec.structs.replace(recipe.scorers, threads=threads),
    )


def evaluate_checkpoint(recipe: Recipe, checkpoint: Path, prompts: int | None) -> "EvalResult":
    """Return the pass rate of the model in `checkpoint` on the recipe's held-out prompts. Raises HeadwayError."""
    from headway.learner.data.prompts import open_prompts
    from headway.learner.models.model import load_tokenizer

    model = msgspec.structs.replace(recipe.model, path=str(checkpoint), random=None)
    source = open_prompts(recipe.prompts, load_tokenizer(model), recipe.run.seed)
    held_out = source.held_out(prompts or recipe.evaluation.prompts, recipe.most_prompt_tokens)
    recipe = msgspec.structs.replace(  # no learner works in this process
        recipe, learner=msgspec.structs.replace(recipe.learner, threads=recipe.engine.threads)
    )
    with Evaluator(recipe, checkpoint, held_out) as evaluator:
        return evaluator.measure()
