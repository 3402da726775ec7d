"""The modules that the process imports from which all others are forked: each library's slow first use is paid once."""

from pathlib import Path

import rollout_workers.decoding
import rollout_workers.scorers.serving
import rollout_workers.worker
from learner.models.files import model_files

from . import learner, scorer, worker
from .trial import Trial

__all__ = ["learner", "rollout_workers", "scorer", "worker"]

_model = Trial(seed=0, minutes=0, directory=Path()).recipe.model
model_files(_model)
