"""One scorer process: the product's, with a double of the model whose score of a response the audit can compute."""

import sys
import time
from collections.abc import Sequence
from functools import partial
from unittest.mock import patch

import headway.rollout_workers.scorers.runtimes
from headway.broker.client.broker import open_broker
from headway.broker.client.scoring import Scores
from headway.broker.errors import ForeignRunError
from headway.broker.schema import ScoreRequest
from headway.deploy.roles import scorer as scoring
from headway.deploy.roles.config_watch import ConfigChangedError
from headway.rollout_workers.config import ScorersConfig

from .process import BEGIN_ANEW, enter
from .tasks import LONGEST, SCORER, VOCABULARY, scores_of
from .trial import BROKER_TIMEOUT_S, RUN, Trial
from .user_code import PROMPT_TOKENS


def run_scorer(trial: Trial, url: str, name: str, process: str) -> None:
    """Run one `process` of the scorer of this name, whose log it continues.

    It ends with code 0 when the run is finished, with BEGIN_ANEW where the product would begin anew.
    """
    enter(trial.directory, name)
    patch.object(headway.rollout_workers.scorers.runtimes, "open_runner", TinyRunner).start()
    patch.object(scoring, "open_broker", partial(open_broker, timeout_s=BROKER_TIMEOUT_S)).start()
    try:
        scoring.score(url, RUN, process, SCORER, ())
    except (ForeignRunError, ConfigChangedError) as error:
        print(error, flush=True)
        sys.exit(BEGIN_ANEW)


TOKENS_PER_S = 1000
"""The speed at which a scorer has requests about half of the time."""


class TinyRunner:
    """The model's double."""

    vocabulary = VOCABULARY
    longest = PROMPT_TOKENS + LONGEST

    def __init__(self, kind: str, path: str, config: ScorersConfig, **named: object) -> None:
        """Take the arguments of `open_runner`, and load nothing."""

    def score(self, requests: Sequence[ScoreRequest]) -> list[Scores]:
        """Return one number for each request."""
        tokens = sum(len(request.prompt_tokens) + len(request.response_tokens) for request in requests)
        time.sleep(tokens / TOKENS_PER_S)
        return [scores_of(request.response_tokens) for request in requests]
