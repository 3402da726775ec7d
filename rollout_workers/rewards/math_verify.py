"""Compares mathematical answers in `\\boxed{...}` with the ground truth, by math-verify.

Comparisons run in a process of their own: a model under training finds an expression that sympy never finishes. Neither
a thread nor an exception can stop that, but a process can be killed.
"""

import logging
import re
from collections.abc import Sequence
from typing import Any

from broker.errors import UserCodeError
from broker.schema import Prompt
from broker.user_code.host_process import HostLostError
from broker.user_code.pool import HostPool
from broker.user_code.roots import import_directory
from broker.user_code.wire import Program

from .base import RewardError, Score

BOX = re.compile(r"\\boxed\s*\{")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""A brace, or a character that a backslash takes its meaning."""
NUMBER = re.compile(r"-?\d+(\.\d+)?")
DOLLAR = re.compile(r"(?<!\\)\$")
AT_ONCE = 100
"""Ground truths that are read in one call."""


class MathVerifyReward:
    """Scores 1 if the last boxed answer equals the ground truth, else 0. What stands outside of the box counts for
    nothing; an empty box, or one that is not closed, is no answer."""

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

    async def complaints(self, prompts: Sequence[Prompt]) -> list[str]:
        """See ReadsTruths. A ground truth that takes too long to read is complained of, too. Numbers start no
        process."""
        truths = [(place, one.ground_truth) for place, one in enumerate(prompts) if not _is_number(one.ground_truth)]
        told = [""] * len(prompts)
        for some in [truths[first : first + AT_ONCE] for first in range(0, len(truths), AT_ONCE)]:
            for (place, _), complaint in zip(some, await self._complaints([one for _, one in some]), strict=True):
                told[place] = complaint
        return told

    async def _complaints(self, truths: Sequence[Any]) -> list[str]:
        try:
            return list(await self._pool.call("complaints", list(truths), deadline_s=self._deadline_s))
        except HostLostError as error:
            if len(truths) == 1:
                return [f"reading the ground truth {truths[0]!r:.200} {error}"]
        return [(await self._complaints([truth]))[0] for truth in truths]

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

    def is_right(self, ground_truth: Any, response: str) -> bool:
        """Return whether the last boxed answer equals `ground_truth`. Raises RewardError if that cannot be told."""
        from math_verify import LatexExtractionConfig, parse, verify

        gold = _read(ground_truth)
        box = last_box(response)
        answer = parse(box, [LatexExtractionConfig()], parsing_timeout=None) if box else []
        return bool(answer) and verify(gold, answer, timeout_seconds=None)

    def complaints(self, truths: Sequence[Any]) -> list[str]:
        """Return for each ground truth why it cannot be read; "" where it can."""
        return [_complaint(truth) for truth in truths]


def _is_number(ground_truth: Any) -> bool:
    return isinstance(ground_truth, str) and NUMBER.fullmatch(ground_truth) is not None


def _complaint(ground_truth: Any) -> str:
    try:
        _read(ground_truth)
    except RewardError as error:
        return str(error)
    return ""


def _read(ground_truth: Any) -> list[Any]:
    """Return the expressions of a ground truth: a number, the last box of a text, or a text that is an expression or
    has one between dollar signs. Raises RewardError for any other."""
    from math_verify import parse

    if isinstance(ground_truth, bool) or not isinstance(ground_truth, str | int | float):
        raise RewardError(f"the ground truth {ground_truth!r:.200} is a {type(ground_truth).__name__}, and no text")
    text = str(ground_truth)
    box = last_box(text)
    if box is None:
        box = text if DOLLAR.search(text) else f"\\boxed{{{text}}}"
    if not (gold := parse(box, parsing_timeout=None)):
        raise RewardError(f"the ground truth {ground_truth!r:.200} is no mathematical expression")
    return list(gold)


def last_box(text: str) -> str | None:
    """Return the last `\\boxed{...}` of the text; "" if it is not closed, None if there is none."""
    starts = [box.end() for box in BOX.finditer(text)]
    if not starts:
        return None
    depth = 1
    for brace in BRACE.finditer(text, starts[-1]):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if not depth:
            return f"\\boxed{{{text[starts[-1] : brace.start()]}}}"
    return ""
