"""What the kinds of agents have in common.

A kind checks all that code from outside gives it. What it does not understand is a ShapeError, which names the class
and what was expected: nothing is guessed.
"""

import inspect
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from shutil import which
from typing import Any

from headway.broker.errors import ConfigError, HeadwayError
from headway.broker.user_code.import_paths import ImportRoots
from headway.rollout_workers.agents.conversation import Message
from headway.rollout_workers.agents.episode import AgentTask, Outcome, Resume
from headway.rollout_workers.rewards.functions import measures, number


class ShapeError(HeadwayError):
    """Code of the user's own, or a program, returned what its kind of agent does not understand."""


class Settings(dict[str, Any]):
    """Settings that code of others reads as items or as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            value = self[name]
        except KeyError:
            raise AttributeError(f"there is no setting {name!r}") from None
        return Settings(value) if isinstance(value, Mapping) else value


def resume_of(own: object, where: str, default: Resume = "replay") -> Resume:
    """Return what the user's own code says of being resumed. Raises ConfigError for another word."""
    match getattr(own, "resume", default):
        case "replay":
            return "replay"
        case "restart":
            return "restart"
        case other:
            raise ConfigError(f"{where}: its attribute resume is {other!r:.100}; it must be 'replay' or 'restart'.")


def row_of(task: AgentTask) -> dict[str, Any]:
    """Return a task as the row of a dataset that it was."""
    ours = {"prompt": task.messages, "ground_truth": task.ground_truth, "data_source": task.data_source}
    return {**ours, **task.extra_info}


def accepted(function: Callable[..., Any], values: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return those of `values` that `function` takes by name. Raises ShapeError where it needs another argument."""
    parameters = inspect.signature(function).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        taken = dict(values)
    else:
        names = {one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
        taken = {name: value for name, value in values.items() if name in names}
    try:
        inspect.signature(function).bind(**taken)
    except TypeError as error:
        raise ShapeError(f"{what}: {error}. It can be given {', '.join(sorted(values)) or 'nothing'}.") from None
    return taken


def check_methods(own: object, names: Collection[str], what: str, where: str) -> None:
    """Raise ConfigError where a class or an object lacks one of these methods. `what` it is expected to be."""
    missing = [name for name in names if not callable(getattr(own, name, None))]
    if missing:
        name = own.__name__ if isinstance(own, type) else type(own).__name__
        raise ConfigError(f"{where}: {name} lacks {', '.join(missing)}(); {what} must have {', '.join(names)}.")


def finite(value: Any, what: str) -> float:
    """Return a reward as a float. Raises ShapeError for what is no finite number."""
    found = number(value)
    if found is None or not math.isfinite(found):
        raise ShapeError(f"{what} is {value!r:.200}; it must be a finite number.")
    return found


def truth(value: Any, what: str) -> bool:
    """Return a truth value of Python or numpy. Raises ShapeError for anything else."""
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        return bool(value)
    raise ShapeError(f"{what} is {value!r:.200}; it must be True or False.")


def messages_of(value: Any, what: str) -> list[Message]:
    """Return a list of messages. Raises ShapeError for what is none."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        found = [dict(one) for one in value if isinstance(one, Mapping) and isinstance(one.get("role"), str)]
        if len(found) == len(value):
            return found
    raise ShapeError(
        f'{what} is {value!r:.200}; it must be a list of messages, such as {{"role": "user", "content": "..."}}.'
    )


def numbers_of(info: Any) -> dict[str, float]:
    """Return the finite numbers of what an environment tells beside its observation."""
    return measures(info)[0] if isinstance(info, Mapping) else {}


def outcome(reward: float | None, told: Mapping[str, float]) -> Outcome:
    """Return an episode's outcome with its measures; without `reward` where it does not apply."""
    return {**told} if reward is None else {**told, "reward": reward}


def check_program(command: Sequence[str], roots: ImportRoots, where: str) -> None:
    """Raise ConfigError where a program may not be run: it is neither a file below the operator's directory, nor named
    by the operator, or is not found."""
    program = command[0] if command else ""
    if not program:
        raise ConfigError(f"{where}: there is no program; write it as a list: [program, argument, ...].")
    file, here = roots.directory / program, roots.directory.resolve()
    is_own = "/" in program and file.is_file() and file.resolve().is_relative_to(here)
    if program not in roots.named and not is_own:
        raise ConfigError(
            f"{where}: {program!r} is not run: it is no file in {roots.directory} (such as ./agent.sh), and no option"
            " of this command allows it. If you trust the author of this configuration, start the workers with"
            f" --allow-import {program}."
        )
    if not is_own and which(program) is None:
        raise ConfigError(f"{where}: there is no program {program!r} on this machine.")


def program_path(command: Sequence[str], directory: Path) -> list[str]:
    """Return a command whose program is found from any working directory."""
    program, *arguments = command
    return [
        os.path.abspath(directory / program) if "/" in program else program,
        *arguments,
    ]  # a link may be what counts
