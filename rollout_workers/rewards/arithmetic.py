"""The arithmetic chain: `^4*5*8+7=` is answered by worked steps, then `#7`."""

from collections.abc import Sequence

from broker.schema import Prompt

from .base import Score


class ArithmeticReward:
    """Scores 1 if the response ended by itself and its text after the last `#` is exactly the ground truth, else 0."""

    async def score(self, prompt: Prompt, response: str, finish_reason: str, tokens: Sequence[int] = ()) -> Score:
        """Score a response. One that the length limit cut off is wrong, even if the answer stands at its end."""
        _, mark, answer = response.rpartition("#")
        is_right = finish_reason == "stop" and mark == "#" and answer == prompt.ground_truth
        return Score(total=float(is_right))

    async def close(self) -> None:
        """Do nothing: there is nothing to free."""
