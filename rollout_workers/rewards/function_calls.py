"""Calls a user's own reward function, in its process, as verl or as TRL does."""

import inspect
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, Literal

from broker.errors import ConfigError
from broker.user_code.roots import ImportRoots

Arguments = dict[str, Any]
Scored = tuple[float, dict[str, float]]
"""The score, and further measures by name."""

SIGNATURES = (
    "verl: compute_score(data_source, solution_str, ground_truth, extra_info) -> float | dict, or "
    "TRL: reward(prompts, completions, **kwargs) -> list[float]"
)
THREADS = 32
"""Calls of a plain function that run side by side. A coroutine function runs as many calls as there are samples."""
COROUTINES = 1024


def open_calls(path: str, signature: Literal["auto", "verl", "trl"], named: Sequence[str], directory: str) -> "Calls":
    """Return the function, ready to be called. Raises ConfigError if it does not exist, is not allowed, or has neither
    signature.

    A function has no methods that a seam could promise, so its signature is checked in place of them."""
    function = ImportRoots(tuple(named), Path(directory)).load(path, "rewards.kind")
    names = inspect.signature(function).parameters
    return Calls(function, signature_of(path, names) if signature == "auto" else signature)


class Calls:
    """Calls one reward function."""

    def __init__(self, function: Callable[..., Any], signature: Literal["verl", "trl"]) -> None:
        self._function = function
        self._parameters = inspect.signature(function).parameters
        outermost = inspect.signature(function, follow_wrapped=False).parameters
        # a decorator may give further ones to the function that it wraps
        self._asked = [name for name, parameter in outermost.items() if _is_asked(parameter)]
        self._arguments, self._read = (
            (_verl_arguments, _verl_score) if signature == "verl" else (_trl_arguments, _trl_score)
        )
        self.places = COROUTINES if inspect.iscoroutinefunction(function) else THREADS

    def score(
        self, text: str, response: str, ground_truth: str, data_source: str, extra_info: dict[str, Any]
    ) -> Scored | Awaitable[Scored]:
        """Score a response. Raises what the function raises, and ValueError if it returns anything but finite
        numbers."""
        arguments = self._arguments(text, response, ground_truth, data_source, extra_info)
        result = self._function(**self._accepted(arguments))
        return self._later(result) if inspect.isawaitable(result) else self._read(result)

    def _accepted(self, arguments: Arguments) -> Arguments:
        """Return the arguments that the function can take: all of them if it has **kwargs. Raises ValueError if it asks
        for others."""
        if lacking := [name for name in self._asked if name not in arguments]:
            raise ValueError(
                f"it asks for {', '.join(lacking)}, and is called with {', '.join(arguments)} alone. Give the parameter"
                " a default, or, by TRL's signature, the prompt's row a column of that name"
            )
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in self._parameters.values()):
            return arguments
        return {name: value for name, value in arguments.items() if name in self._parameters}

    async def _later(self, result: Awaitable[Any]) -> Scored:
        return self._read(await result)


def signature_of(path: str, names: Collection[str]) -> Literal["verl", "trl"]:
    """Return the signature of a function with parameters of these names. Raises ConfigError for neither."""
    if "solution_str" in names and "completions" not in names:
        return "verl"
    if "completions" in names and "solution_str" not in names:
        return "trl"
    raise ConfigError(
        f"rewards: {path}({', '.join(names)}) has neither of the signatures that can be called. {SIGNATURES}"
    )


def _verl_arguments(
    text: str, response: str, ground_truth: str, data_source: str, extra_info: dict[str, Any]
) -> Arguments:
    return {
        "data_source": data_source,
        "solution_str": response,
        "ground_truth": ground_truth,
        "extra_info": extra_info,
    }


def _trl_arguments(
    text: str, response: str, ground_truth: str, data_source: str, extra_info: dict[str, Any]
) -> Arguments:
    columns = {**extra_info, "data_source": data_source, "ground_truth": ground_truth}
    columns |= {"prompts": text, "completions": response}
    return {name: [value] for name, value in columns.items()}


def _is_asked(parameter: inspect.Parameter) -> bool:
    """Whether a call must give this parameter."""
    is_one = parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    return is_one and parameter.default is parameter.empty


def _verl_score(result: Any) -> Scored:
    if not isinstance(result, Mapping):
        return _finite(result), {}
    if "score" not in result:
        raise ValueError(f"a dict must have the key 'score', this one has {sorted(result)}")
    parts = {str(key): float(value) for key, value in result.items() if key != "score" and isinstance(value, Real)}
    return _finite(result["score"]), parts


def _trl_score(result: Any) -> Scored:
    if isinstance(result, str) or not hasattr(result, "__len__") or len(result) != 1:
        raise ValueError(f"one completion must give a list of one number, not {result!r}")
    return _finite(result[0]), {}


def _finite(value: Any) -> float:
    """Return a number of Python, numpy or torch as a finite float."""
    if value is None or isinstance(value, str) or not math.isfinite(number := float(value)):
        raise ValueError(f"returned {value!r}, which is no finite number")
    return number
