"""Your own reward functions by import path, with the signature of verl or of TRL.

verl  `compute_score(data_source, solution_str, ground_truth, extra_info) -> float | dict` with "score"
TRL   `reward(prompts, completions, **kwargs) -> list[float]`; kwargs are the dataset's columns as lists:
      ground_truth, data_source and extra_info's keys, and completion_ids

They run in processes of their own (`broker.user_code`), under a deadline: `FunctionReward` asks, and `FunctionCaller`
calls the function there.
"""

import ast
import inspect
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from headway.broker.errors import ConfigError, UserCodeError
from headway.broker.schema import Prompt
from headway.broker.user_code.host import Program
from headway.broker.user_code.import_paths import ImportRoots, definition
from headway.broker.user_code.pool import HostPool
from headway.rollout_workers.config import RewardConfig

from .base import CallFailures, DroppedMeasures, Score


def check_function(config: RewardConfig, where: str) -> None:
    """Raise ConfigError, before anything runs, where the source shows that `open_function` would. `where` is the key of
    the function's path."""
    found = definition(config.kind, where)
    if isinstance(found, ast.ClassDef) or found is None or found.decorator_list or config.signature != "auto":
        return
    of = found.args
    every = (*of.posonlyargs, *of.args, of.vararg, *of.kwonlyargs, of.kwarg)
    signature_of(config.kind, [one.arg for one in every if one is not None])


async def open_function(config: RewardConfig, roots: ImportRoots) -> "FunctionReward":
    """Open `package.module:function` as a reward, in processes of its own. Raises ConfigError if it does not exist, may
    not be imported or fits neither signature, UserCodeError if importing it hangs or ends its process."""
    roots.check(config.kind, "rewards.kind")
    program = Program(
        name=f"reward {config.kind}",
        factory=f"{__name__}:open_caller",
        arguments={
            "path": config.kind,
            "signature": config.signature,
            "named": roots.named,
            "directory": str(roots.directory),
        },
        import_path=str(roots.directory),
    )
    pool = HostPool(program, processes=config.processes)
    try:
        await pool.open()
        reads_tokens = await pool.call("reads_tokens", deadline_s=config.deadline_s)
    except BaseException:
        await pool.close()
        raise
    return FunctionReward(config.kind, pool, config.deadline_s, reads_tokens=reads_tokens)


class FunctionReward:
    """Calls one function in processes that can be killed."""

    def __init__(self, path: str, pool: HostPool, deadline_s: float, *, reads_tokens: bool = False) -> None:
        self._pool = pool
        self._deadline_s = deadline_s
        self._reads_tokens = reads_tokens
        self._left_out = DroppedMeasures(f"reward {path}")
        self._failures = CallFailures(
            f"reward {path}", "Return a number for every response, within rewards.deadline_s.", deadline_s
        )

    async def score(self, prompt: Prompt, response: str, finish_reason: str, tokens: Sequence[int] = ()) -> Score:
        """Score a response. `components` has the function's further measures, and as `left_out` the number of those
        that are not finite, if there are any. Raises UnscoredError if the function twice raises, returns a score that
        is no finite number, passes its deadline or ends its process; RewardError if it fails again and again."""
        asked = FunctionInput(
            prompt.text,
            prompt.messages,
            response,
            list(tokens) if self._reads_tokens else [],
            prompt.ground_truth,
            prompt.data_source,
            prompt.extra_info,
        )
        try:
            total, parts, left_out = await self._pool.call("score", asked, deadline_s=self._deadline_s)
        except UserCodeError as error:
            raise self._failures.note(prompt, error) from error
        self._failures.note_success()
        return Score(total=total, components=self._left_out.note(parts, left_out))

    async def close(self) -> None:
        """Kill its processes."""
        await self._pool.close()


Signature = Literal["verl", "trl"]
Arguments = dict[str, Any]
Logged = dict[str, list[float]]
"""The values that one call has given to TRL's `log_metric`."""
Scored = tuple[float, dict[str, float], list[str]]
"""The score, further measures by name, and the names of those that are left out because they are not finite."""

SIGNATURES = (
    "verl: compute_score(data_source, solution_str, ground_truth, extra_info) -> float | dict, or "
    "TRL: reward(prompts, completions, **kwargs) -> list[float]"
)
THREADS = 32
"""Calls of a plain function that run side by side. A coroutine function runs as many calls as there are samples."""
COROUTINES = 1024
MOST_MEASURES = 100
"""The most measures beside a score: each becomes a curve of the run."""
MOST_CHARACTERS = 100
"""The most characters of a measure's name, which is cut behind them."""
BY_NAME = frozenset({"trainer_state", "log_extra", "log_metric", "extra_info"})
"""Arguments that a function of TRL's signature gets where it names them, and not in its **kwargs, which then holds
lists alone."""


class FunctionInput(msgspec.Struct, frozen=True, array_like=True):
    """A response that is to be scored, with its prompt."""

    text: str
    """The prompt as the model read it."""
    messages: list[dict[str, Any]] | None
    """The prompt as its row has it, if that is a conversation."""
    response: str
    tokens: list[int]
    """The tokens after the prompt; none for a function that does not read them."""
    ground_truth: Any
    data_source: str
    extra_info: dict[str, Any]


def open_caller(
    path: str, signature: Literal["auto", "verl", "trl"], named: Sequence[str], directory: str
) -> "FunctionCaller":
    """Return the function, ready to be called. Raises ConfigError if it does not exist, is not allowed, or has neither
    signature.

    A function has no methods that a seam could promise, so its signature is checked in place of them."""
    function = ImportRoots(tuple(named), Path(directory)).load(path, "rewards.kind")
    names = inspect.signature(function).parameters
    known = signature_of(path, names) if signature == "auto" else signature
    return FunctionCaller(function, known, messages=signature == "trl")


class FunctionCaller:
    """Calls one reward function."""

    def __init__(self, function: Callable[..., Any], signature: Signature, *, messages: bool = False) -> None:
        """`messages`: TRL's `prompts` are the messages of a conversation, and not the text that the model read."""
        self._function = function
        self._signature = signature
        self._messages = messages
        self._parameters = inspect.signature(function).parameters
        self._takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in self._parameters.values())
        outermost = inspect.signature(function, follow_wrapped=False).parameters
        # a decorator may give further ones to the function that it wraps
        self._required = [name for name, parameter in outermost.items() if _is_required(parameter)]
        self.places = COROUTINES if inspect.iscoroutinefunction(function) else THREADS

    def reads_tokens(self) -> bool:
        """Return whether the function is given a response's tokens."""
        return self._signature == "trl" and (self._takes_all or "completion_ids" in self._parameters)

    def score(self, asked: Any) -> Scored | Awaitable[Scored]:
        """Score a response, a `FunctionInput` as plain data. Raises what the function raises, and ValueError if its
        score is no finite number."""
        logged: Logged = {}
        arguments = self._arguments(msgspec.convert(asked, FunctionInput), logged)
        result = self._function(**self._accepted(arguments))
        return self._later(result, logged) if inspect.isawaitable(result) else self._read(result, logged)

    def _arguments(self, asked: FunctionInput, logged: Logged) -> Arguments:
        if self._signature == "verl":
            return {
                "data_source": asked.data_source,
                "solution_str": asked.response,
                "ground_truth": asked.ground_truth,
                "extra_info": asked.extra_info,
            }
        columns = {**asked.extra_info, "data_source": asked.data_source, "ground_truth": asked.ground_truth}
        columns |= {"extra_info": asked.extra_info, "completion_ids": asked.tokens}
        columns["prompts"], columns["completions"] = self._as_trl(asked)
        logs = {"trainer_state": NoTrainer(), "log_metric": metric_logger(logged), "log_extra": _keep_nothing}
        return {**{name: [value] for name, value in columns.items()}, **logs}

    def _as_trl(self, asked: FunctionInput) -> tuple[Any, Any]:
        """Return the prompt and the completion. An answer that the prompt has begun belongs to the completion."""
        if asked.messages is None:
            return asked.text, asked.response
        messages, begun = asked.messages, ""
        if messages[-1].get("role") == "assistant":
            *messages, last = messages
            begun = str(last.get("content") or "")
        completion = [{"role": "assistant", "content": begun + asked.response}]
        return messages if self._messages else asked.text, completion

    def _accepted(self, arguments: Arguments) -> Arguments:
        """Return the arguments that the function can take. Raises ValueError if it asks for others."""
        if lacking := [name for name in self._required if name not in arguments]:
            raise ValueError(
                f"it asks for {', '.join(lacking)}, and is called with {', '.join(arguments)} alone. Give the parameter"
                " a default, or, by TRL's signature, the prompt's row a column of that name"
            )
        named, rest = self._parameters, () if self._signature == "verl" else BY_NAME
        return {
            name: value for name, value in arguments.items() if name in named or (self._takes_all and name not in rest)
        }

    def _read(self, result: Any, logged: Logged) -> Scored:
        score, further = (_verl_score if self._signature == "verl" else _trl_score)(result)
        means = {name: sum(values) / len(values) for name, values in logged.items()}
        return score, *measures({**further, **means})

    async def _later(self, result: Awaitable[Any], logged: Logged) -> Scored:
        return self._read(await result, logged)


class NoTrainer:
    """TRL's `trainer_state`, for functions that take it and do not read it. A field that is read is no AttributeError,
    in the place of which `getattr` and `hasattr` would take a default for the step."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python asks for what an object can do
            raise AttributeError(name)
        raise RuntimeError(
            f"trainer_state.{name} is not known: workers score responses beside training, of several steps' weights."
            " Let the score depend on the response and its row alone"
        )


def metric_logger(logged: Logged) -> Callable[[str, Any], None]:
    """Return TRL's `log_metric(name, value)`: the mean of a name's values becomes a measure of the sample."""

    def log_metric(name: str, value: Any) -> None:
        if (found := number(value)) is None:
            raise ValueError(f"log_metric({name!r}, {value!r:.200}): the value is no number")
        logged.setdefault(str(name), []).append(found)

    return log_metric


def _keep_nothing(column: str, values: Any) -> None:
    """Take the place of TRL's `log_extra(column, values)`: there is no table of completions."""


def signature_of(path: str, names: Collection[str]) -> Signature:
    """Return the signature of a function with parameters of these names. Raises ConfigError for neither."""
    if "solution_str" in names and "completions" not in names:
        return "verl"
    if "completions" in names and "solution_str" not in names:
        return "trl"
    raise ConfigError(
        f"rewards: {path}({', '.join(names)}) has neither of the signatures that can be called. {SIGNATURES}"
    )


def measures(named: Mapping[Any, Any]) -> tuple[dict[str, float], list[str]]:
    """Return the finite numbers among the values, by name, and the names of those that are not finite, which have no
    mean. Raises ValueError for too many."""
    found = ((str(name)[:MOST_CHARACTERS], number(value)) for name, value in named.items())
    numbers = {name: value for name, value in found if value is not None}
    if len(numbers) > MOST_MEASURES:
        raise ValueError(f"returned {len(numbers)} measures; at most {MOST_MEASURES} are kept")
    finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
    return finite, [name for name in numbers if name not in finite]


def number(value: Any) -> float | None:
    """Return a number or truth value of Python, numpy or torch, also as an array without dimensions, as a float; None
    for anything else. One that no float can hold is infinite."""
    is_text = isinstance(value, str | bytes | bytearray) or getattr(getattr(value, "dtype", None), "kind", "f") in "USO"
    if value is None or is_text or getattr(value, "ndim", 0) != 0:
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        return None


def _is_required(parameter: inspect.Parameter) -> bool:
    """Whether a call must give this parameter."""
    is_one = parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    return is_one and parameter.default is parameter.empty


def _verl_score(result: Any) -> tuple[float, Mapping[Any, Any]]:
    if not isinstance(result, Mapping):
        return _finite(result), {}
    if "score" not in result:
        raise ValueError(f"a dict must have the key 'score', this one has {sorted(map(str, result))}")
    return _finite(result["score"]), {name: value for name, value in result.items() if name != "score"}


def _trl_score(result: Any) -> tuple[float, Mapping[Any, Any]]:
    is_list = hasattr(result, "__getitem__") and hasattr(result, "__len__") and getattr(result, "ndim", 1) == 1
    if isinstance(result, str | Mapping) or not is_list or len(result) != 1:
        raise ValueError(f"one completion must give a list of one number, not {result!r}")
    return _finite(next(iter(result))), {}


def _finite(value: Any) -> float:
    """Return a score as a finite float."""
    found = number(value)
    if found is None or not math.isfinite(found):
        raise ValueError(f"returned {value!r}, which is no finite number")
    return found
