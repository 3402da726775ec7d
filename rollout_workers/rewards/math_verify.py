"""Compares mathematical answers in `\\boxed{...}` with the ground truth, by math-verify.

Comparisons run in a process of their own: a model under training finds an expression that sympy never finishes. Neither
a thread nor an exception can stop that, but a process can be killed.
"""

import logging
from collections.abc import Sequence

from broker.errors import UserCodeError
from broker.schema import Prompt
from broker.user_code.host_process import HostLostError
from broker.user_code.pool import HostPool
from broker.user_code.roots import import_directory
from broker.user_code.wire import Program

from .base import RewardError, Score


class MathVerifyReward:
    """Scores 1 if the last boxed answer equals the ground truth, else 0."""

    def __init__(self, deadline_s: float, processes: int = 1, *, warms: bool = False) -> None:
        program = Program(name="math_verify", factory=f"{__name__}:Comparisons", import_path=str(import_directory()))
        self._pool = HostPool(program, processes=processes)
        if warms:
            self._pool.warm()
        self._deadline_s = deadline_s

    async def score(self, prompt: Prompt, response: str, finish_reason: str, tokens: Sequence[int] = ()) -> Score:
        """Score a response. It is also 0 if comparing it twice takes too long or ends the process;
        `components["timed_out"]` is 1 then."""
        try:
            is_right = await self._pool.call("is_right", prompt.ground_truth, response, deadline_s=self._deadline_s)
        except HostLostError:
            return Score(total=0.0, components={"timed_out": 1.0})
        except UserCodeError as error:
            raise RewardError(f"prompt {prompt.group!r} ({prompt.text[:80]!r}): {error}") from error
        return Score(total=float(is_right), components={"timed_out": 0.0})

    async def close(self) -> None:
        """Kill its processes; the next score starts others."""
        await self._pool.close()


class Comparisons:
    """Calls math-verify, in the process where it runs."""

    places = 1
    """One call at a time, because sympy keeps what it knows of symbols in globals."""

    def __init__(self) -> None:
        import math_verify  # imported here, before a call waits for an answer

        assert math_verify
        logging.disable(logging.WARNING)

    def is_right(self, ground_truth: str, response: str) -> bool:
        """Return whether the last boxed answer equals `ground_truth`. Raises RewardError if that cannot be told."""
        from math_verify import LatexExtractionConfig, parse, verify

        gold = parse(_boxed(ground_truth), parsing_timeout=None)
        if not gold:
            raise RewardError(f"the ground truth {ground_truth!r} is no mathematical expression")
        start = response.rfind("\\boxed")
        answer = parse(response[start:], [LatexExtractionConfig()], parsing_timeout=None) if start >= 0 else []
        return bool(answer) and verify(gold, answer, timeout_seconds=None)


def _boxed(ground_truth: str) -> str:
    return ground_truth if "\\boxed" in ground_truth or "$" in ground_truth else f"\\boxed{{{ground_truth}}}"
