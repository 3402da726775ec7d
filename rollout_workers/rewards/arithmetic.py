"""The arithmetic chain: `^4*5*8+7=` is answered by worked steps, then `#7`."""

from collections.abc import Sequence
from typing import Any

from headway.broker.schema import Prompt

from .base import RewardError, Score


class ArithmeticReward:
    """Scores 1 if the response ended by itself and its text after the last `#` is exactly the ground truth, else 0."""

    async def score(self, prompt: Prompt, response: str, finish_reason: str, tokens: Sequence[int] = ()) -> Score:
        """Score a response. One that the length limit cut off is wrong, even if the answer stands at its end. Raises
        RewardError for a ground truth that is neither text nor a whole number."""
        if complaint := _complaint(prompt.ground_truth):
            raise RewardError(f"prompt {prompt.group!r} ({prompt.text[:80]!r}): {complaint}")
        _, mark, answer = response.rpartition("#")
        is_right = finish_reason == "stop" and mark == "#" and answer == str(prompt.ground_truth)
        return Score(total=float(is_right))

    async def complaints(self, prompts: Sequence[Prompt]) -> list[str]:
        """See ReadsTruths."""
        return [_complaint(prompt.ground_truth) for prompt in prompts]

    async def close(self) -> None:
        """Do nothing: there is nothing to free."""


def _complaint(truth: Any) -> str:
    is_readable = isinstance(truth, str | int) and not isinstance(truth, bool)
    return "" if is_readable else f"the ground truth {truth!r:.200} is a {type(truth).__name__}, and no text"
