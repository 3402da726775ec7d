"""Small agents, tools and environments of each shape that the tests of kinds play with."""

import asyncio
import sqlite3
import time
from collections.abc import Mapping
from threading import get_ident
from typing import Annotated, Any, Literal

import msgspec

from headway.rollout_workers.agents.conversation import ToolCall
from headway.rollout_workers.agents.episode import AgentEpisode, AgentTask

closed: list[str] = []
"""What was closed, in the order of its closing. Tests empty it."""


async def rollout(episode: AgentEpisode, task: AgentTask, *, reward: float = 1.0) -> float:
    """Let the model answer once."""
    await episode.chat(task.messages)
    return reward


async def measured(episode: AgentEpisode, task: AgentTask) -> Mapping[str, float]:
    """Return a reward and a measure."""
    answer = await episode.chat(task.messages)
    return {"reward": 0.5, "length": len(answer.content)}


def plain(episode: AgentEpisode, task: AgentTask) -> float:
    """Is no coroutine function."""
    return 1.0


async def of_one_argument(episode: AgentEpisode) -> float:
    """Take no task."""
    return 1.0


class Player:
    """Is an agent with state and a word about resuming."""

    resume = "restart"

    def __init__(self, reward: float) -> None:
        self.reward = reward

    async def rollout(self, episode: AgentEpisode, task: AgentTask) -> float | None:
        """Let the model answer once."""
        answer = await episode.chat(task.messages)
        return None if answer.is_over else self.reward

    def close(self) -> None:
        """Note it."""
        closed.append("player")


class BadResume(Player):
    """Says a word about resuming that does not exist."""

    resume = "again"


class NoRollout:
    """Lacks the method."""


class Point(msgspec.Struct):
    """A place."""

    x: int
    y: int = 0


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first
            number.
        b (int): The second one.

    Returns:
        The product.
    """
    return a * b


async def where(point: Point, names: list[str], unit: Literal["m", "km"] = "m") -> dict[str, Any]:
    """Return the place."""
    return {"x": point.x, "y": point.y, "names": names, "unit": unit}


def described(text: Annotated[str, msgspec.Meta(max_length=3)]) -> str:
    """Return the text."""
    return text


def fails(reason: str) -> str:
    """Raise an error."""
    raise KeyError(reason)


def exits() -> str:
    """End the process."""
    raise SystemExit(3)


async def exits_later() -> str:
    """End the process, from the event loop."""
    raise SystemExit(3)


async def is_interrupted() -> str:
    """Raise what ends an event loop."""
    raise KeyboardInterrupt


async def cancels_itself() -> str:
    """Raise what nobody asked for."""
    raise asyncio.CancelledError


class Unsaid(Exception):  # noqa: N818 - as its users see it
    """Fails to say what it is."""

    def __str__(self) -> str:
        """Raise."""
        raise ValueError("unsaid")


class Unheard(BaseException):
    """Is no Exception."""


def is_unsaid() -> str:
    """Raise an error that has no text."""
    raise Unsaid


def exits_unsaid() -> str:
    """End the process with what has no text."""
    raise SystemExit(Unsaid())


def is_unheard() -> str:
    """Raise what few catch."""
    raise Unheard("no")


def stops() -> str:
    """Raise what no future takes."""
    raise StopIteration


def hangs() -> str:
    """Never return, and keep a processor busy."""
    while True:
        pass


def sleeps(seconds: float) -> str:
    """Sleep."""
    time.sleep(seconds)
    return "awake"


async def waits() -> str:
    """Never return."""
    await asyncio.Event().wait()
    return ""


def huge(size: int) -> str:
    """Return a long text."""
    return "x" * size


def surrogate() -> str:
    """Return half a character."""
    return "\ud800"


def untyped(a, b):  # type: ignore[no-untyped-def]
    """Lack types."""
    return a, b


def of_many(*numbers: int) -> int:
    """Take any number of arguments."""
    return sum(numbers)


def of_object(thing: NoRollout) -> str:
    """Take what JSON cannot express."""
    return str(thing)


class Records:
    """Notes the thread of each call in a connection that only the thread that made it may use."""

    def __init__(self, limit: int = 3) -> None:
        self.connection = sqlite3.connect(":memory:")
        self.thread = get_ident()
        self.limit = limit

    def close(self) -> None:
        """Close the connection, in its thread."""
        self.connection.execute("SELECT 1")
        self.connection.close()
        closed.append(type(self).__name__)


class Desk(Records):
    """Has the shape of TRL's environment factories."""

    def reset(self, prompt: Any, answer: int, **row: Any) -> str | None:
        """Begin."""
        self.connection.execute("CREATE TABLE notes (number)")
        self.answer, self.row, self.right = answer, row, 0.0
        return " Note the answer."

    def note(self, number: int) -> str:
        """Note a number.

        Args:
            number: It.
        """
        self.connection.execute("INSERT INTO notes VALUES (?)", (number,))
        self.right = float(number == self.answer)
        return "noted"

    async def count(self) -> int:
        """Count the notes."""
        return self.limit

    def get_reward(self) -> float:
        """Return whether the last number was right."""
        return self.right

    def _private(self) -> None:
        """Is no tool."""


class Toolless:
    """Has nothing to call."""

    def reset(self, **row: Any) -> None:
        """Begin."""


class Guess(Records):
    """Is an environment of four values: guess the number that is the seed."""

    def reset(self, task: AgentTask) -> str:
        """Begin."""
        self.connection.execute("SELECT 1")
        self.number, self.turns = task.seed, 0
        return "Guess."

    def step(self, action: str | ToolCall) -> tuple[Any, float, bool, dict[str, Any]]:
        """Say whether the number is higher or lower."""
        self.connection.execute("SELECT 1")
        assert get_ident() == self.thread
        self.turns += 1
        guess = int(action if isinstance(action, str) else msgspec.json.decode(action.arguments)["number"])
        is_right = guess == self.number
        said = "right" if is_right else "higher" if guess < self.number else "lower"
        return said, float(is_right), is_right or self.turns >= self.limit, {"guesses": self.turns, "said": said}


class Gymnasium(Guess):
    """Is the same with Gymnasium's shapes."""

    def reset(self, task: AgentTask) -> Any:
        """Begin."""
        return [{"role": "user", "content": super().reset(task)}], {}

    def step(self, action: str | ToolCall) -> Any:
        """Say whether the number is higher or lower."""
        said, reward, is_done, info = super().step(action)
        return said, reward, reward > 0, is_done and not reward, info


class WithTools(Guess):
    """Is the same, by a tool."""

    tools = [  # noqa: RUF012
        {"type": "function", "function": {"name": "guess", "description": "", "parameters": {"type": "object"}}}
    ]


class Wrong(Guess):
    """Returns what is asked of it in place of a step."""

    def __init__(self, returns: Any) -> None:
        super().__init__()
        self.returns = tuple(returns) if isinstance(returns, list) else returns

    def step(self, action: Any) -> Any:
        """Return it."""
        return self.returns


class Hanging(Guess):
    """Never returns from a step."""

    def step(self, action: Any) -> Any:
        """Keep a processor busy."""
        while True:
            pass


class Sum:
    """Has the shape of SkyRL-Gym's BaseTextEnv."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        self.truth = (extras or {})["reward_spec"]["ground_truth"]
        self.hint = env_config.hint
        self.turns = 0

    def init(self, prompt: list[dict[str, str]]) -> Any:
        """Begin."""
        return prompt, {}

    def step(self, action: str) -> Any:
        """Say a hint after a wrong answer."""
        self.turns += 1
        is_right = action == self.truth
        said = [] if is_right else [{"role": "user", "content": self.hint}]
        return {"observations": said, "reward": float(is_right), "done": is_right, "metadata": {}}

    def get_metrics(self) -> dict[str, Any]:
        """Return measures."""
        return {"tries": self.turns, "name": "sum"}

    def close(self) -> None:
        """Note it."""
        closed.append("Sum")


class WrongSum(Sum):
    """Returns another shape."""

    def step(self, action: str) -> Any:
        """Return a tuple."""
        return [], 1.0, True, {}


class Loop:
    """Has the shape of verl's AgentLoop: two calls of the model, on tokens."""

    def __init__(self, trainer_config: Any, server_manager: Any, tokenizer: Any, **others: Any) -> None:
        self.server_manager = server_manager
        self.length = trainer_config.config.actor.length

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        """Generate, add tokens, generate once more."""
        ids = [1, 2, 3]
        for _ in range(2):
            output = await self.server_manager.generate(
                request_id="x", prompt_ids=ids, sampling_params={**sampling_params, "max_tokens": self.length}
            )
            ids = [*ids, *output.token_ids, 9]
        said = {"prompt_ids": ids[:3], "response_ids": ids[3:], "response_mask": [1] * len(ids[3:])}
        return {**said, "num_turns": 4, "reward_score": 0.75, "extra_fields": {"tries": 2, "index": row["index"]}}


class HotLoop(Loop):
    """Changes how tokens are sampled."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        """Generate hotter."""
        return await self.server_manager.generate("x", prompt_ids=[1], sampling_params={"temperature": 2.0})
