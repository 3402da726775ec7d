"""An OpenEnv server with one environment at a time: `python openenv_server.py PORT LOG`."""

import os
import sys
from pathlib import Path
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class GuessAction(Action):  # type: ignore[misc]
    """A number, as text."""

    message: str


class GuessObservation(Observation):  # type: ignore[misc]
    """What is said to it."""

    said: str = ""


class GuessEnvironment(Environment):  # type: ignore[misc]
    """Has the seed guessed."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self._note("opened")

    def reset(self, seed: int | None = None, episode_id: str | None = None, hint: str = "", **row: Any) -> Any:
        """Begin."""
        self.number = seed or 0
        return GuessObservation(said=f"Guess.{hint}", done=False, reward=None)

    def step(self, action: Any, **others: Any) -> Any:
        """Say whether the number is higher or lower."""
        if action.message == "break":
            raise ValueError("it is broken")
        guess = int(action.message)
        is_right = guess == self.number
        said = "right" if is_right else "higher" if guess < self.number else "lower"
        return GuessObservation(said=said, done=is_right, reward=float(is_right))

    @property
    def state(self) -> Any:
        """Return nothing of interest."""
        return State()

    def close(self) -> None:
        """Note it."""
        self._note("closed")

    def _note(self, what: str) -> None:
        with Path(sys.argv[2]).open("a") as log:
            log.write(f"{what}\n")


if __name__ == "__main__":
    os.environ.setdefault("NO_PROXY", "127.0.0.1")
    app = create_fastapi_app(GuessEnvironment, GuessAction, GuessObservation, max_concurrent_envs=1)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
