"""Any reasoning-gym task, scored by the task's own verifier.

The prompt carries `extra_info = {"task": name, "entry": the entry with question, answer and metadata}`.
"""

import asyncio
import functools
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from broker.schema import Prompt

from .base import RewardError, Score

ScoreAnswer = Callable[[str | None, dict[str, Any]], float]

TUPLE_TASKS = ("arc_agi", "rearc")
"""Their verifiers compare tuples, which arrive as lists."""


class ReasoningGymScorer:
    """`score_answer` of the prompt's task on the last `<answer>...</answer>`, or else on the whole text."""

    async def score(self, prompt: Prompt, response: str, finish_reason: str) -> Score:
        """A number in [0, 1]; several tasks give partial credit."""
        return await asyncio.to_thread(score_response, prompt, response)

    async def close(self) -> None:
        """Nothing to free."""


def score_response(prompt: Prompt, response: str) -> Score:
    """The part that blocks. `tagged` tells whether the response used the answer tags."""
    import reasoning_gym  # all of it: its parts do not wait for another thread that is half way through it
    from reasoning_gym.utils import extract_answer

    assert reasoning_gym
    task, entry = _task_and_entry(prompt)
    tagged: str | None = extract_answer(response)
    answer = response.strip() if tagged is None else tagged
    return Score(total=_score_answer(task, answer, entry), components={"tagged": float(tagged is not None)})


def _score_answer(task: str, answer: str, entry: dict[str, Any]) -> float:
    """Some verifiers raise on malformed answers: worth 0, unless the entry is at fault."""
    verifier = _verifier(task)
    try:
        return float(verifier(answer, entry))
    except Exception:  # noqa: BLE001 - 106 verifiers; the right answer tells whose fault it is
        _refuse_bad_entry(task, verifier, entry)
        return 0.0


def _refuse_bad_entry(task: str, verifier: ScoreAnswer, entry: dict[str, Any]) -> None:
    try:
        right = entry["answer"]
        verifier(None if right is None else str(right), entry)
    except Exception as error:
        raise RewardError(
            f"reasoning_gym task {task!r} cannot score even the right answer of its entry, which "
            f"has {sorted(entry)}: {type(error).__name__}: {error}"
        ) from error


def _task_and_entry(prompt: Prompt) -> tuple[str, dict[str, Any]]:
    task, entry = prompt.extra_info.get("task"), prompt.extra_info.get("entry")
    if not isinstance(task, str) or not isinstance(entry, dict):
        raise RewardError(
            f"the reasoning_gym reward needs extra_info['task'] and ['entry'], prompt {prompt.group!r} "
            f"has {sorted(prompt.extra_info) or 'no extra_info'}; use the reasoning_gym prompts"
        )
    return task, _with_tuples(entry) if task in TUPLE_TASKS else entry


def _with_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_tuples(item) for key, item in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


@functools.cache
def _verifier(task: str) -> ScoreAnswer:
    """A task's verifier keeps no state between answers, so one serves all threads."""
    from reasoning_gym.factory import DATASETS, get_score_answer_fn

    if task not in DATASETS:
        nearest = get_close_matches(task, list(DATASETS), n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise RewardError(f"reasoning_gym has no task {task!r} among its {len(DATASETS)}{hint}")
    verifier: ScoreAnswer = get_score_answer_fn(task)
    return verifier
