"""Evaluations that the workers make beside training, as the learner's first rank asks for them and hears of them.

The learner asks before it publishes a version, looks after every step, and waits only once nothing is left to train. An
evaluation whose samples are all in gives a result. One that can no longer be completed gives none, as samples that end
early would count for more; it is logged and counted.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence

from headway.broker.client.evaluations import EvaluationProgress
from headway.broker.schema import Prompt, WeightVersion
from headway.deploy.recipe.recipe import Recipe
from headway.learner.experience.stream import Experience
from headway.rollout_workers.evaluate import EvalResult, summarize

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
