"""A request's tokens as a model reads them."""

import numpy as np
from numpy.typing import NDArray

from headway.broker.schema import ScoreRequest


def sequence(request: ScoreRequest) -> NDArray[np.int32]:
    """Return [P + R] tokens."""
    return np.concatenate([request.prompt_tokens, request.response_tokens])
