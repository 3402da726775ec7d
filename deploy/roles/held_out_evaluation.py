"""The pass rate on held-out prompts: measured in the learner's process, or by the workers beside training.

In the learner's process the engine sleeps between evaluations, and the learner has the memory. The learner's first rank
asks the workers for evaluations, and collects their results.
"""

import asyncio
import logging
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import msgspec

from headway.broker.client.broker import open_broker
from headway.broker.client.evaluations import EvaluationProgress
from headway.broker.schema import Prompt, WeightVersion
from headway.broker.schema.weights import ModelFiles
from headway.deploy.recipe.pools import scorers_of
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.recipe.trust import roots_of
from headway.learner.experience.stream import Experience
from headway.rollout_workers.evaluation import EvalResult, summarize

from .scorer import local_scorers, scorer_clients

if TYPE_CHECKING:
    import torch

    from headway.rollout_workers.evaluation import EvalResult


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
        from headway.rollout_workers.model_download import write_model
        from headway.rollout_workers.rewards import ZeroReward, open_reward

        from .player import open_player
        from .trained_model import own_decoding

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
        open_scorer = local_scorers(recipe) if self._broker is None else scorer_clients(self._broker)
        self._scorer = (
            self._runner.run(open_reward(recipe.rewards, roots_of(recipe), open_scorer))
            if recipe.rewards
            else ZeroReward()
        )
        self._player = self._runner.run(open_player(recipe, self._scorer, self._decoding, model_dir, roots_of(recipe)))

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
        from headway.rollout_workers.evaluation import evaluate, evaluation_sampling

        if tensors is not None:
            self._swaps += 1
            await self._engine.wake()
            await self._engine.swap_weights(WeightVersion(0, self._swaps), tensors)
        result = await evaluate(
            self._engine,
            prompts,
            self._player,
            self._decoding,
            evaluation_sampling(self._recipe.sampling, self._recipe.evaluation),
            self._recipe.evaluation.pass_reward,
            samples=self._recipe.evaluation.samples,
        )
        if tensors is not None:  # the next measurement brings its own weights
            await self._engine.sleep()
        return result

    async def _close(self) -> None:
        await self._engine.close()
        await self._player.close()
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
    from headway.learner.models.pretrained import load_tokenizer

    model = msgspec.structs.replace(recipe.model, path=str(checkpoint), random=None)
    source = open_prompts(recipe.prompts, load_tokenizer(model), recipe.run.seed)
    held_out = source.held_out(prompts or recipe.evaluation.prompts, recipe.most_prompt_tokens)
    recipe = msgspec.structs.replace(  # no learner works in this process
        recipe, learner=msgspec.structs.replace(recipe.learner, threads=recipe.engine.threads)
    )
    with Evaluator(recipe, checkpoint, held_out) as evaluator:
        return evaluator.measure()


QUIET_S = 30.0
"""A version that is not the newest is evaluated no further once no worker has asked for so long and five heartbeats
more: a worker that takes part asks about once a heartbeat."""
MOST_HOLDS = 10
"""An evaluation is given up after so many times evaluation.hold_s, whatever workers say."""
POLL_S = 0.2
"""Seconds between two looks at the evaluations that are waited for."""

log = logging.getLogger(__name__)


class WorkerEvaluations:
    """The evaluations under way, oldest first. Results come in the order of the versions."""

    def __init__(self, recipe: Recipe, experience: Experience, prompts: Sequence[Prompt]) -> None:
        self._config = recipe.evaluation
        self._experience = experience
        self._prompts = prompts
        self._quiet_s = QUIET_S + 5 * recipe.workers.heartbeat_s
        self._pending: list[WeightVersion] = []
        self._asked_s = dict[WeightVersion, float]()
        """When workers were asked for each of these."""
        self._newest: WeightVersion | None = None
        """The newest version that was published."""
        self.skipped = 0
        """Evaluations without a result: too few workers held their version for long enough."""

    @property
    def pending(self) -> tuple[WeightVersion, ...]:
        """The versions whose evaluations are under way."""
        return tuple(self._pending)

    def awaited(self) -> set[int]:
        """Return the steps whose weights are being evaluated."""
        return {version.step for version in self._pending}

    def publishes(self, version: WeightVersion, *, is_due: bool) -> None:
        """Note that `version` is about to be published, and ask workers to evaluate it if that is due."""
        is_new, self._newest = version != self._newest, version
        if is_due and is_new:
            self._pending.append(version)
            self._asked_s[version] = time.monotonic()
        if version in self._pending:  # published again as the server has lost it, perhaps with the samples
            self._experience.ask_to_evaluate(version, self._prompts, self._config.samples, self._config.hold_s)

    def collect(self, *, is_end: bool = False) -> Iterator[tuple[WeightVersion, EvalResult]]:
        """Yield the versions that have been evaluated since the last call, with their results. With `is_end` the newest
        version is given up too if no worker asks for it. Raises StopRequested."""
        while self._pending:
            version = self._pending[0]
            progress = self._experience.evaluation(version)
            is_done = progress is not None and progress.done == progress.samples
            if progress is not None and is_done:
                yield version, summarize(progress.results, self._config.samples)
            elif reason := self._hopeless(version, progress, is_end):
                self._skip(version, reason)
            else:
                return
            self._pending.remove(version)
            del self._asked_s[version]
            self._experience.end_evaluation(version, is_skipped=not is_done)

    def wait(self, should_stop: Callable[[], bool]) -> Iterator[tuple[WeightVersion, EvalResult]]:
        """Yield the results that are still to come, each once it is there, until none is or the learner is to stop."""
        while self._pending and not should_stop():
            yield from self.collect(is_end=True)
            if self._pending:
                time.sleep(POLL_S)

    def _hopeless(self, version: WeightVersion, progress: EvaluationProgress | None, is_end: bool) -> str:
        """Return why the evaluation gives no result; "" where it still may."""
        if progress is None:
            return "the server has lost it"
        done = f"{progress.done} of {progress.samples} samples were done"
        # Workers may still keep an older version that they evaluate.
        quiet_s = self._quiet_s + (self._config.hold_s if version == self._newest else 0)
        if (version != self._newest or is_end) and progress.quiet_s > quiet_s:
            return f"{done}, and no worker is at work on it any more"
        if time.monotonic() - self._asked_s[version] > MOST_HOLDS * self._config.hold_s:
            return f"{done} after {MOST_HOLDS} times evaluation.hold_s"
        return ""

    def _skip(self, version: WeightVersion, reason: str) -> None:
        self.skipped += 1
        log.warning(
            "the evaluation of step %d gives no result: %s. Workers keep a version for evaluation.hold_s=%g s at most."
            " Skipped so far: %d.",
            version.step,
            reason,
            self._config.hold_s,
            self.skipped,
        )
