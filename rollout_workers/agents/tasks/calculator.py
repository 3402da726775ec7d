"""Arithmetic with a calculator: the model works a chain out call by call, and writes the result behind a mark.

    user: ^47*12+83=   assistant: calculate("47*12")   tool: 64   assistant: calculate("64+83") ...   assistant: #47

Prompts come from `prompts.kind: arithmetic`, whose `modulus` the calculator takes over, or from any source with numbers
as ground truths; without a modulus the calculator is exact.
"""

import ast
import operator
from fractions import Fraction
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headway.broker.user_code.import_paths import ImportRoots
from headway.rollout_workers.agents.conversation import begin
from headway.rollout_workers.agents.episode import Agent, AgentEpisode, AgentTask, Outcome
from headway.rollout_workers.agents.tools.text_tools import TextTool
from headway.rollout_workers.agents.tools.toolbox import Toolbox, ToolError, ToolTurns

LONGEST_EXPRESSION = 200
LARGEST = 10**60
"""The largest number that the calculator holds, and the largest denominator of a fraction."""
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


class CalculatorOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the model is told, and how long it may work."""

    instructions: str = ""
    """The system message; empty: none."""
    answer_mark: Annotated[str, Meta(min_length=1)] = "#"
    """The result stands behind the last of these."""
    error_text: str = ""
    """What the model reads of a call that failed, for models of a few characters; empty: the reason."""
    max_turns: Annotated[int, Meta(ge=1, le=1000)] = 12
    """The most answers of the model."""


class Calculator(Agent):
    """Reward 1 for the right result behind the mark in an answer that was not cut, else 0."""

    def __init__(self, options: CalculatorOptions, roots: ImportRoots, where: str) -> None:
        self._options = options

    async def rollout(self, episode: AgentEpisode, task: AgentTask) -> Outcome:
        """Play one episode. Raises ValueError for a prompt without a ground truth or with an unusable modulus."""
        if not isinstance(task.ground_truth, str | int | float):
            raise ValueError(f"task {task.id}: the ground truth {task.ground_truth!r:.80} is no number")
        toolbox = Toolbox([calculator(_modulus(task))], error_text=self._options.error_text)
        turns = ToolTurns(episode, begin(task.messages, self._options.instructions), toolbox, self._options.max_turns)
        answer = await turns.answer()
        is_right = not turns.is_cut and self._is_right(answer, str(task.ground_truth))
        return {"reward": float(is_right), **toolbox.measures}

    def _is_right(self, answer: str | None, truth: str) -> bool:
        _, mark, result = (answer or "").rpartition(self._options.answer_mark)
        return bool(mark) and _number(result) == _number(truth)


def calculator(modulus: int = 0) -> TextTool:
    """Return the tool; with a modulus its results are whole numbers below that."""

    def calculate(expression: str) -> str:
        return calculated(expression, modulus)

    parameters = {"expression": "such as 12*(3+4)"}
    return TextTool(calculate, "Works out an expression of numbers, + - * / and parentheses.", parameters)


def calculated(expression: str, modulus: int = 0) -> str:
    """Return an expression's value as the calculator writes it. Raises ToolError."""
    return _written(evaluate(expression), modulus)


def evaluate(expression: str) -> Fraction:
    """Return an expression's exact value. Raises ToolError for anything else than arithmetic within the limits."""
    if len(expression) > LONGEST_EXPRESSION:
        raise ToolError(f"the expression has more than {LONGEST_EXPRESSION} characters")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body, expression.strip())
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ToolError("this is no expression of numbers, + - * / and parentheses") from None


def _value(node: ast.expr, source: str) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            found = Fraction(ast.get_source_segment(source, node) or str(value))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            found = -_value(operand, source)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            found = _OPERATORS[type(op)](_value(left, source), _value(right, source))
        case _:
            raise ValueError("no arithmetic")
    if abs(found.numerator) > LARGEST or found.denominator > LARGEST:
        raise ToolError("a number is too large")
    return found


def _written(value: Fraction, modulus: int) -> str:
    if modulus:
        if value.denominator != 1:
            raise ToolError(f"this calculator has whole numbers below {modulus} alone")
        return str(value.numerator % modulus)
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.12g}"


def _modulus(task: AgentTask) -> int:
    modulus: Any = task.extra_info.get("modulus", 0)
    if not isinstance(modulus, int) or modulus < 0:
        raise ValueError(f"task {task.id}: extra_info.modulus is {modulus!r:.80}, which is no number of 0 or more")
    return modulus


def _number(text: str) -> Fraction | str:
    """Return the number that a text is, or the text where it is none."""
    text = text.strip().replace(",", "")
    try:
        return Fraction(text) if len(text) <= LONGEST_EXPRESSION and "e" not in text.lower() else text
    except (ValueError, ZeroDivisionError):
        return text
