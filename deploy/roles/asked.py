"""Workers ask the scorers of reward models and of the teacher, as the recipe names them."""

from functools import partial
from typing import TYPE_CHECKING

from headway.broker.client.broker import Broker
from headway.deploy.recipe.operators import roots_of_scorers
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.recipe.scorers import REWARD_MODEL, scorers_of
from headway.rollout_workers.config import RewardConfig

if TYPE_CHECKING:
    from headway.rollout_workers.rewards import ScorerOpener
    from headway.rollout_workers.samples.taught import AskedTeacher
    from headway.rollout_workers.scorers import TokenScorer


def asking(broker: Broker, worker: str = "") -> "ScorerOpener":
    """Return what opens the scorers of a run's reward models for a worker, or for the learner."""

    def opened(name: str, config: RewardConfig) -> "TokenScorer":
        return _asked(broker, worker, name, config.deadline_s)

    return opened


def holding(recipe: Recipe) -> "ScorerOpener":
    """Return what opens reward models in this process, for commands that have no broker."""
    from headway.rollout_workers.scorers.runtimes import open_runner
    from headway.rollout_workers.scorers.scorer_client import InProcessScorer

    keys = {scorer.name: scorer.key for scorer in scorers_of(recipe)}

    def opened(name: str, config: RewardConfig) -> "TokenScorer":
        open_one = partial(open_runner, REWARD_MODEL, config.path, recipe.scorers, key=keys[name])
        return InProcessScorer(
            partial(open_one, most_tokens=recipe.engine.max_model_len, roots=roots_of_scorers(recipe))
        )

    return opened


def open_teacher(broker: Broker, recipe: Recipe, worker: str) -> "AskedTeacher | None":
    """Return the recipe's teacher; None where it has none."""
    from headway.rollout_workers.samples.taught import TEACHER, AskedTeacher

    if not recipe.teacher.path:
        return None
    scorer = _asked(broker, worker, TEACHER, recipe.teacher.deadline_s)
    return AskedTeacher(
        scorer,
        temperature=recipe.sampling.temperature,
        deadline_s=recipe.teacher.deadline_s,
        top_k=recipe.algorithm.distillation.candidates,
    )


def _asked(broker: Broker, worker: str, name: str, hold_s: float) -> "TokenScorer":
    from headway.rollout_workers.outages import Outages
    from headway.rollout_workers.scorers.scorer_client import ScorerClient

    return ScorerClient(broker.scoring, Outages(broker.url), name, hold_s=hold_s, worker=worker)
