"""Loads the model of a scorer's kind by transformers."""

from headway.rollout_workers.config import ScorersConfig
from headway.rollout_workers.scorers.base import Runner, ScoringModel

from .reward_model import RewardModel
from .teacher import TeacherModel


def open_transformers(asked: ScoringModel, config: ScorersConfig) -> Runner:
    """Load the model. Raises UnfitModelError."""
    return TeacherModel(asked, config) if asked.kind == "teacher" else RewardModel(asked, config)
