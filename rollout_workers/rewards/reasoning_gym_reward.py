"""Scores any reasoning-gym task by the task's own verifier.

The prompt carries `extra_info = {"task": name, "entry": the entry with question, answer and metadata}`. Verifiers run
in a process of their own: several evaluate what the model wrote, which may never end.
"""

import functools
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any

from headway.broker.errors import UserCodeError
from headway.broker.schema import Prompt
from headway.broker.user_code.host import Program
from headway.broker.user_code.import_paths import import_directory
from headway.broker.user_code.pool import HostLostError, HostPool

from .base import RewardError, Score

ScoreAnswer = Callable[[str | None, dict[str, Any]], float]

TUPLE_TASKS = ("arc_agi", "rearc")
"""Tasks whose verifiers compare tuples; these arrive as lists."""


class ReasoningGymReward:
    """Applies `score_answer` of the prompt's task to the last `<answer>...</answer>`, or else to the whole text."""

    def __init__(self, deadline_s: float, processes: int = 1, *, warms: bool = False) -> None:
        program = Program(name="reasoning_gym", factory=f"{__name__}:Verifiers", import_path=str(import_directory()))
        self._pool = HostPool(program, processes=processes)
        if warms:
            self._pool.warm()
        self._deadline_s = deadline_s

    async def score(self, prompt: Prompt, response: str, finish_reason: str, tokens: Sequence[int] = ()) -> Score:
        """Return a score in [0, 1]; several tasks give partial credit. It is also 0 if the verifier twice takes too
        long or ends its process; `components["timed_out"]` is 1 then. `tagged` says whether the response used the
        answer tags."""
        arguments = (prompt.group, prompt.extra_info, response)
        try:
            total, tagged = await self._pool.call("score", *arguments, deadline_s=self._deadline_s)
        except HostLostError:
            return Score(total=0.0, components={"timed_out": 1.0})
        except UserCodeError as error:
            raise RewardError(str(error)) from error
        return Score(total=total, components={"tagged": tagged, "timed_out": 0.0})

    async def complaints(self, prompts: Sequence[Prompt]) -> list[str]:
        """See GroundTruthReader. An entry is unfit that has no task, or whose task cannot judge its right answer."""
        asked = [(prompt.group, prompt.extra_info) for prompt in prompts]
        return [await self._pool.call("complaint", *one, deadline_s=self._deadline_s) for one in asked]

    async def close(self) -> None:
        """Kill its processes; the next score starts others."""
        await self._pool.close()


class Verifiers:
    """Runs reasoning-gym's verifiers, in the process where they run."""

    places = 4
    """Threads that run verifiers side by side. Verifiers compute in Python."""

    def __init__(self) -> None:
        import reasoning_gym  # the whole package: its parts cannot be imported by several threads at once

        assert reasoning_gym

    def score(self, group: str, extra_info: dict[str, Any], response: str) -> tuple[float, float]:
        """Return the score, and 1 if the response used the answer tags. Raises RewardError for an invalid entry."""
        from reasoning_gym.utils import extract_answer

        task, entry = _task_and_entry(group, extra_info)
        tagged: str | None = extract_answer(response)
        answer = response.strip() if tagged is None else tagged
        return _score_answer(task, answer, entry), float(tagged is not None)

    def complaint(self, group: str, extra_info: dict[str, Any]) -> str:
        """Return why the entry is invalid; "" where it is not."""
        try:
            task, entry = _task_and_entry(group, extra_info)
            _refuse_bad_entry(task, _verifier(task), entry)
        except RewardError as error:
            return str(error)
        return ""


def _score_answer(task: str, answer: str, entry: dict[str, Any]) -> float:
    """Return the verifier's score. Some verifiers raise on malformed answers, which are worth 0 unless the entry is at
    fault."""
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


def _task_and_entry(group: str, extra_info: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    task, entry = extra_info.get("task"), extra_info.get("entry")
    if not isinstance(task, str) or not isinstance(entry, dict):
        raise RewardError(
            f"the reasoning_gym reward needs extra_info['task'] and ['entry'], prompt {group!r} "
            f"has {sorted(extra_info) or 'no extra_info'}; use the reasoning_gym prompts"
        )
    return task, _with_tuples(entry) if task in TUPLE_TASKS else entry


def _with_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_tuples(item) for key, item in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


@functools.cache
def _verifier(task: str) -> ScoreAnswer:
    """Return a task's verifier. It keeps no state between answers, so one serves all threads."""
    from reasoning_gym.factory import DATASETS, get_score_answer_fn

    if task not in DATASETS:
        nearest = get_close_matches(task, list(DATASETS), n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise RewardError(f"reasoning_gym has no task {task!r} among its {len(DATASETS)}{hint}")
    verifier: ScoreAnswer = get_score_answer_fn(task)
    return verifier
