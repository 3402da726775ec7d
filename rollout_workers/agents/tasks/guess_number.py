"""Guess a number: after each guess the model reads whether the hidden number is higher or lower."""

import random
import re
from typing import Annotated

import msgspec
from msgspec import Meta

from headway.broker.errors import ConfigError
from headway.broker.user_code.import_paths import ImportRoots
from headway.rollout_workers.agents.conversation import Message
from headway.rollout_workers.agents.episode import Agent, AgentEpisode, AgentTask, Outcome

_NUMBER = re.compile(r"-?\d{1,12}(?!\d)")


class GuessNumberOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers, and what the model reads; `{low}`, `{high}` and `{guesses}` in a text stand for these."""

    low: Annotated[int, Meta(ge=-1_000_000_000, le=1_000_000_000)] = 1
    high: Annotated[int, Meta(ge=-1_000_000_000, le=1_000_000_000)] = 1000
    guesses: Annotated[int, Meta(ge=1, le=1000)] = 10
    """The most guesses; halving the range finds one of 1000 numbers within 10."""
    opening: str = "Find my number, from {low} to {high}, within {guesses} guesses. Answer each time with one number."
    higher: str = "Higher."
    """Said when the hidden number is higher than the guess."""
    lower: str = "Lower."
    unclear: str = "Answer with one number from {low} to {high}."
    """Said for an answer whose last number is not among these, which counts as a guess."""


class GuessNumber(Agent):
    """Reward 1 for the number within the guesses, else 0. The last number of an answer is the guess."""

    def __init__(self, options: GuessNumberOptions, roots: ImportRoots, where: str) -> None:
        if options.low >= options.high:
            raise ConfigError(f"{where}: low {options.low} must be below high {options.high}.")
        self._options = options

    async def rollout(self, episode: AgentEpisode, task: AgentTask) -> Outcome:
        """Play one episode."""
        hidden = random.Random(f"guess_number:{task.seed}").randint(self._options.low, self._options.high)
        messages: list[Message] = [{"role": "user", "content": self._filled(self._options.opening)}]
        for used in range(1, self._options.guesses + 1):
            answer = await episode.chat(messages)
            if answer.is_over:
                return {"reward": 0.0, "guesses": used - 1.0}
            guess = self._guess(answer.content)
            if guess == hidden:
                return {"reward": 1.0, "guesses": float(used)}
            messages += [answer.message, {"role": "user", "content": self._hint(guess, hidden)}]
        return {"reward": 0.0, "guesses": float(self._options.guesses)}

    def _guess(self, text: str) -> int | None:
        found = _NUMBER.findall(text)
        guess = int(found[-1]) if found else None
        return guess if guess is not None and self._options.low <= guess <= self._options.high else None

    def _hint(self, guess: int | None, hidden: int) -> str:
        if guess is None:
            return self._filled(self._options.unclear)
        return self._filled(self._options.higher if hidden > guess else self._options.lower)

    def _filled(self, text: str) -> str:
        for name in ("low", "high", "guesses"):
            text = text.replace(f"{{{name}}}", str(getattr(self._options, name)))
        return text
