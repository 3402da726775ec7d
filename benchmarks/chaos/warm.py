"""The modules that the process imports from which all others are forked: each library's slow first use is paid once."""

from pathlib import Path

from headway.learner.models.model_files import model_files
from headway.rollout_workers import decoding
from headway.rollout_workers import worker as worker_loop
from headway.rollout_workers.scorers import serving

from . import learner, worker
from .trial import Trial

__all__ = ["decoding", "learner", "serving", "worker", "worker_loop"]

_model = Trial(seed=0, minutes=0, directory=Path()).recipe.model
model_files(_model)
