"""The models that scorers run, by the kind of their scorer.

    requests ─► loading.py: sequences of several lengths as one batch ─► reward_model.py: a score of each
                                                                      └► teacher.py: logprobs of each token

`base.py` of the room above has their seam, `Runner`, and `candidates.py` the checks of a teacher's likeliest tokens.

The invariant: an answer depends on its own request alone, whatever else is in the batch, up to rounding.
"""

from pathlib import Path

from rollout_workers.config import ScorersConfig
from rollout_workers.scorers.base import Runner

KINDS = ("reward_model", "teacher")


def open_runner(kind: str, path: str, config: ScorersConfig, *, key: str, policy: Path | None = None) -> Runner:
    """Load the model in `path`, a directory or a hub id, which the recipe names under `key`.

    `policy`: the directory with the tokenizer of the model that is trained, which the scorer's must equal. Raises
    UnfitModelError for a model that is missing, of another kind or of another vocabulary.
    """
    from .loading import check_same_tokenizer

    assert kind in KINDS, kind
    if policy is not None:
        check_same_tokenizer(path, policy, key)
    if kind == "teacher":
        from .teacher import TeacherModel

        return TeacherModel(path, config, key, policy)
    from .reward_model import RewardModel

    return RewardModel(path, config, key)
