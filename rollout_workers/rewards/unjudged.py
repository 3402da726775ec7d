"""A reward for runs that only generate: nothing is trained on their responses."""

from collections.abc import Sequence

from headway.broker.schema import Prompt

from .base import Score


class Unjudged:
    """Gives every response 0."""

    async def score(self, prompt: Prompt, response: str, finish_reason: str, tokens: Sequence[int] = ()) -> Score:
        """See Reward."""
        return Score(total=0.0)

    async def close(self) -> None:
        """See Reward."""
