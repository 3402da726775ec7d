"""Your own reward functions, in the signature of verl or of TRL, by import path.

verl  `compute_score(data_source, solution_str, ground_truth, extra_info) -> float | dict` with "score"
TRL   `reward(prompts, completions, **kwargs) -> list[float]`; kwargs are the dataset's columns as lists:
      ground_truth, data_source and extra_info's keys
"""

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, Literal

from broker.errors import ConfigError
from broker.schema import Prompt
from broker.user_code.roots import ImportRoots

from .base import RewardError, Score, Scorer

RewardFunction = Callable[..., Any]
Arguments = dict[str, Any]

SIGNATURES = (
    "verl: compute_score(data_source, solution_str, ground_truth, extra_info) -> float | dict, or "
    "TRL: reward(prompts, completions, **kwargs) -> list[float]"
)


def open_function(path: str, signature: Literal["auto", "verl", "trl"], roots: ImportRoots) -> Scorer:
    """`package.module:function` as a scorer. Raises ConfigError if it is not there or fits neither."""
    function: RewardFunction = roots.load(path, "rewards.kind")
    match _detect(path, function) if signature == "auto" else signature:
        case "verl":
            return FunctionScorer(path, function, _verl_arguments, _verl_score)
        case _:
            return FunctionScorer(path, function, _trl_arguments, _trl_score)


class FunctionScorer:
    """Calls one function in a thread (or awaits it), so that generation is never blocked."""

    def __init__(
        self,
        path: str,
        function: RewardFunction,
        arguments: Callable[[Prompt, str], Arguments],
        read: Callable[[Any], Score],
    ) -> None:
        self._path = path
        self._function = function
        self._arguments = arguments
        self._read = read

    async def score(self, prompt: Prompt, response: str, finish_reason: str) -> Score:
        """Raises RewardError if the function raises, or returns anything but finite numbers."""
        arguments = _accepted(self._function, self._arguments(prompt, response))
        try:
            result = await asyncio.to_thread(self._function, **arguments)
            score = self._read(await result if inspect.isawaitable(result) else result)
        except Exception as error:
            raise RewardError(
                f"reward {self._path} failed on prompt {prompt.group!r} ({prompt.text[:80]!r}): "
                f"{type(error).__name__}: {error}\nIt was called with {', '.join(arguments)}. The worker "
                "stops, because a 0 in its place would be trained on; return a number for every response."
            ) from error
        return score

    async def close(self) -> None:
        """Nothing to free."""


def _detect(path: str, function: RewardFunction) -> Literal["verl", "trl"]:
    names = inspect.signature(function).parameters
    if "solution_str" in names and "completions" not in names:
        return "verl"
    if "completions" in names and "solution_str" not in names:
        return "trl"
    raise ConfigError(
        f"rewards: {path}({', '.join(names)}) has neither of the signatures that can be called. {SIGNATURES}"
    )


def _verl_arguments(prompt: Prompt, response: str) -> Arguments:
    return {
        "data_source": prompt.data_source,
        "solution_str": response,
        "ground_truth": prompt.ground_truth,
        "extra_info": prompt.extra_info,
    }


def _trl_arguments(prompt: Prompt, response: str) -> Arguments:
    columns = {**prompt.extra_info, "data_source": prompt.data_source, "ground_truth": prompt.ground_truth}
    columns |= {"prompts": prompt.text, "completions": response}
    return {name: [value] for name, value in columns.items()}


def _accepted(function: RewardFunction, arguments: Arguments) -> Arguments:
    """Those that the function can take: all of them if it has **kwargs."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def _verl_score(result: Any) -> Score:
    if not isinstance(result, Mapping):
        return Score(total=_finite(result))
    if "score" not in result:
        raise ValueError(f"a dict must have the key 'score', this one has {sorted(result)}")
    parts = {key: float(value) for key, value in result.items() if key != "score" and isinstance(value, Real)}
    return Score(total=_finite(result["score"]), components=parts)


def _trl_score(result: Any) -> Score:
    if isinstance(result, str) or not hasattr(result, "__len__") or len(result) != 1:
        raise ValueError(f"one completion must give a list of one number, not {result!r}")
    return Score(total=_finite(result[0]))


def _finite(value: Any) -> float:
    """Numbers of Python, numpy and torch."""
    if value is None or isinstance(value, str) or not math.isfinite(number := float(value)):
        raise ValueError(f"returned {value!r}, which is no finite number")
    return number
