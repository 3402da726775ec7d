"""One learner process: the product's, resuming from the newest checkpoint, with a double of the model."""

from ctypes import c_int64
from functools import partial
from typing import Any
from unittest.mock import patch

from headway.broker import BlockingBroker
from headway.broker.schema import Group, SampleLimits, Trajectory, WeightVersion
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.roles import learner as training
from headway.deploy.roles.observer import RunObserver
from headway.learner.backends.base import Backend
from headway.learner.batching.packing import PackableSequence
from headway.learner.stages import starting_point
from headway.learner.stages.loop import TrainedStep

from .backend import TinyBackend
from .pills import is_pill
from .process import enter
from .protections import take_out
from .tasks import VOCABULARY, what_is_wrong
from .trail import StepRecord, Trained
from .trial import BROKER_TIMEOUT_S, MAX_LAG, Trial


def run_learner(trial: Trial, url: str, incarnation: c_int64) -> None:
    """Run the process: code 0 once every prompt has been trained. `incarnation` becomes the one that it claims."""
    enter(trial.directory, "learner")
    take_out(trial.without)
    TinyBackend.trails, TinyBackend.weights_name = trial.trails, trial.weights_name
    TinyBackend.step_s = trial.step_s

    def claim_run(*arguments: Any, **named: Any) -> starting_point.RunClaim:
        claimed = starting_point.claim_run(*arguments, **named)
        incarnation.value = claimed.claim.owner.incarnation
        return claimed

    patch.object(training, "claim_run", claim_run).start()
    patch.object(training, "RunObserver", TrailObserver).start()
    patch.object(training, "_limits", _limits).start()
    patch.object(training, "BlockingBroker", partial(BlockingBroker, timeout_s=BROKER_TIMEOUT_S)).start()
    training.train(trial.recipe, url, resume=True)


def _limits(recipe: Recipe) -> SampleLimits:
    """Return limits for the engine's double, which has more tokens than the tokenizer."""
    return SampleLimits(vocabulary=VOCABULARY, max_new_tokens=recipe.sampling.max_new_tokens)


class TrailObserver(RunObserver):
    """An observer that also writes the learner's trail."""

    def on_weights(self, version: WeightVersion, backend: Backend, is_last: bool) -> None:
        assert isinstance(backend, TinyBackend)
        self._backend, self._digest = backend, backend.digest
        backend.trail.append(
            StepRecord(version, self._digest, ())
        )  # workers hold these weights, whether the step is trained or not
        super().on_weights(version, backend, is_last)

    def on_step(self, step: TrainedStep) -> None:
        pairs = [(group, trajectory) for group in step.groups for trajectory in group.trajectories]
        trained = (_trained(*pair, sequence) for pair, sequence in zip(pairs, step.scored.sequences, strict=True))
        self._backend.trail.append(StepRecord(step.version, self._digest, tuple(trained)))
        super().on_step(step)


def _trained(group: Group, trajectory: Trajectory, sequence: PackableSequence) -> Trained:
    over = (sequence.lags > MAX_LAG) & (sequence.loss_mask != 0)
    wrong = what_is_wrong(group.prompt, trajectory)
    pill = is_pill(trajectory)
    return Trained(str(trajectory.tid), trajectory.spans, int(over.sum()), wrong, trajectory.identity, pill)
