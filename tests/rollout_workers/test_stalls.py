"""When an engine counts as one that hangs."""

import pytest

from broker.errors import HeadwayError
from rollout_workers.samples.stalls import PATIENCE_S, StallWatch


def test_only_requests_without_a_token_count() -> None:
    watch = StallWatch(PATIENCE_S / 3)
    for requests, tokens in [(2, 5), (2, 5), (2, 5), (2, 6), (2, 6), (2, 6), (0, 6), (1, 6), (1, 6), (1, 6)]:
        watch.look(requests, tokens)
    with pytest.raises(HeadwayError, match="has 1 requests and has sampled nothing for 600 s"):
        watch.look(1, 6)
