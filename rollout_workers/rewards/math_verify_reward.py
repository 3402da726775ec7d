"""Compares mathematical answers in `\\boxed{...}` with the ground truth, by math-verify.

Comparisons run in a process of their own: a model under training finds an expression that sympy never finishes. Neither
a thread nor an exception can stop that, but a process can be killed.
"""

import logging
import math
import re
from collections.abc import Sequence
from typing import Any

from headway.broker.errors import UserCodeError
from headway.broker.schema import Prompt
from headway.broker.user_code.host import Program
from headway.broker.user_code.import_paths import import_directory
from headway.broker.user_code.pool import HostLostError, HostPool

from .base import RewardError, Score

BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*(?:\{|([-+]?\.?\d[^\s$]*))")
"""The beginning of a box, or a whole one without braces, such as `\\boxed 5`."""
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""A brace, or a character that a backslash takes its meaning."""
NUMBER = re.compile(r"-?\d+(\.\d+)?")
SCIENTIFIC = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+))[eE]([-+]?\d{1,3})")
MIXED = re.compile(r"([-+]?\d+)\s+(\d+)\s*/\s*(\d+)")
THIN_SPACE = re.compile(r"(?<=\d)(?:\\[,;: ]|~|_)(?=\d{3}(?!\d))")
"""A separator of thousands other than a comma."""
NAME = re.compile(r"(?<![\\a-zA-Z])(sin|cos|tan|log|ln|exp|pi)(?![a-zA-Z])")
"""A function or number by its name, which LaTeX has a command for."""
UNIT = re.compile(r"([-+]?\d[\d.,/\s]*?)\s+(?!percent)[^\W\d_]{3,}(?:\s+[^\W\d_]+)*\.?")
"""A number and its unit in words; math-verify knows some units, and reads others as products of their letters."""
UNCLEAR = re.compile(
    r"[-+]?\d(?:[\d.,]*\d)?\s+(?:[^\W\d_]{3,}\s+)?[\d.]|\d{4}-\d\d?-\d\d?\b|\d[\d:.]*\s*[ap]\.?m\b", re.IGNORECASE
)
"""Numbers beside each other, a date, a time of day: math-verify reads these as a product, a difference, an hour."""
WORDS = re.compile(r"(?=.*[^\W\d_]{3})[^\W\d_]+(?:[\s'-]+[^\W\d_]+)*\.?")
"""Words, one of them of three letters or more; math-verify reads them as products of their letters."""
STYLE = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
DOLLAR = re.compile(r"(?<!\\)\$")
DECIMAL_PLACES = 6
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
        """See GroundTruthReader. A ground truth that takes too long to read is complained of, too. Numbers start no
        process."""
        truths = [(place, one.ground_truth) for place, one in enumerate(prompts) if not _is_number(one.ground_truth)]
        found = [""] * len(prompts)
        for some in [truths[first : first + AT_ONCE] for first in range(0, len(truths), AT_ONCE)]:
            for (place, _), complaint in zip(some, await self._complaints([one for _, one in some]), strict=True):
                found[place] = complaint
        return found

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

        gold, answer = _read(ground_truth), last_box(response)
        if not answer:
            return False
        if isinstance(gold, str):
            return gold == _words(answer)
        if (expression := _expression(answer)) is None:
            return False
        found = parse(f"\\boxed{{{expression}}}", [LatexExtractionConfig()], parsing_timeout=None)
        return bool(found) and verify(gold, found, float_rounding=_places(gold), timeout_seconds=None)

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


def _read(ground_truth: Any) -> list[Any] | str:
    """Return the expressions of a ground truth, or its words. It is a number, the last box of a text, or a text that is
    an expression or has one between dollar signs. Raises RewardError for any other."""
    from math_verify import parse

    if isinstance(ground_truth, bool) or not isinstance(ground_truth, str | int | float):
        raise RewardError(f"the ground truth {ground_truth!r:.200} is a {type(ground_truth).__name__}, and no text")
    if isinstance(ground_truth, float) and not math.isfinite(ground_truth):
        raise RewardError(f"the ground truth {ground_truth} is no finite number")
    text = ground_truth if isinstance(ground_truth, str) else repr(ground_truth)
    box = last_box(text)
    if box is None and DOLLAR.search(text):
        gold = parse(text, parsing_timeout=None)
    elif (words := _words(text if box is None else box)) is not None:
        return words
    elif (expression := _expression(text if box is None else box)) is None:
        raise RewardError(
            f"the ground truth {ground_truth!r:.200} could be read as several numbers, as a date or as a time. Write"
            " one number, or give a reward of your own"
        )
    else:
        gold = parse(f"\\boxed{{{expression}}}", parsing_timeout=None)
    if not gold or all(isinstance(one, str) for one in gold):
        raise RewardError(
            f"the ground truth {ground_truth!r:.200} is no mathematical expression that math-verify reads. Write it in"
            " LaTeX, such as x^2, \\sqrt{2} or 90^\\circ"
        )
    return list(gold)


def _words(text: str) -> str | None:
    """Return a text that is words alone, in one form however it is set; None for any other."""
    plain = " ".join(STYLE.sub(r"\1", text).split())
    return plain.rstrip(".").casefold() if WORDS.fullmatch(plain) else None


def _expression(text: str) -> str | None:
    """Return an expression with its numbers as math-verify reads them; None if a person could read it in two ways."""
    plain = THIN_SPACE.sub("", text.strip())
    if number := UNIT.fullmatch(plain):
        plain = number[1]
    if number := SCIENTIFIC.fullmatch(plain):
        return f"{number[1].rstrip('.')}\\times10^{{{int(number[2])}}}"
    if plain.endswith(".") and plain[-2:-1].isdigit():
        plain = plain[:-1]
    plain = NAME.sub(r"\\\1", MIXED.sub(r"\1\\frac{\2}{\3}", plain, count=1))
    return None if UNCLEAR.match(plain) else plain


def _places(gold: Sequence[Any]) -> int:
    """Return the decimal places to which floats are compared: math-verify's own six, or more for a small number, so
    that it is told from its double."""
    try:
        size = abs(float(gold[0]))
    except (TypeError, ValueError, OverflowError):
        return DECIMAL_PLACES
    return max(DECIMAL_PLACES, 3 - math.floor(math.log10(size))) if size else DECIMAL_PLACES


def last_box(text: str) -> str | None:
    """Return what the last `\\boxed{...}` or `\\fbox{...}` of the text holds, or `5` of `\\boxed 5`; "" if it is not
    closed, None if there is none."""
    starts = list(BOX.finditer(text))
    if not starts:
        return None
    if starts[-1][1]:
        return starts[-1][1].rstrip(".,;")
    depth = 1
    for brace in BRACE.finditer(text, starts[-1].end()):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if not depth:
            return text[starts[-1].end() : brace.start()].strip()
    return ""
