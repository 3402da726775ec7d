"""`textarena`: a single-player game of the package TextArena (0.7).

The model reads what the game says since its last answer, and not the whole history anew, as the conversation has it.
The game is made with the task's seed, so all samples of a group play the same one.
"""

import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any

import msgspec
import numpy

from headway.broker.errors import ConfigError
from headway.broker.installation import check_extra
from headway.broker.user_code.import_paths import ImportRoots
from headway.rollout_workers.agents.conversation import Message, begin
from headway.rollout_workers.agents.episode import Agent, AgentAnswer, AgentEpisode, AgentTask, Outcome
from headway.rollout_workers.agents.tools.threads import EpisodeThread
from headway.rollout_workers.agents.tools.toolbox import Count, Seconds, cut

from .base import ShapeError, finite, outcome, truth
from .turns import TurnReply, play

DRAWS = Lock()
"""Guards the random numbers of the process, which all games draw from."""


class TextArenaOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The game, and its limits."""

    game: str
    """Its name, such as GuessTheNumber-v0. A task's field `game` comes before it."""
    arguments: dict[str, Any] = {}
    """What the game is made with, by name."""
    system_prompt: str = ""
    """What the model reads first."""
    max_turns: Count = 50
    """The most answers of the model."""
    step_s: Seconds = 60.0
    """A move that takes longer ends its episode."""
    max_observation_chars: Count = 20_000
    """The rest of a longer observation is cut off."""


class TextArenaAgent(Agent):
    """Makes a game for each episode; its reward is the player's."""

    def __init__(self, options: TextArenaOptions, roots: ImportRoots, where: str) -> None:
        check_extra("textarena", "textarena", f"{where.removesuffix('.options')}.kind=textarena")
        self._options = options
        _check_game(options.game, f"{where}.game")

    async def rollout(self, episode: AgentEpisode, task: AgentTask) -> Outcome:
        """Play one episode."""
        name = str(task.extra_info.get("game", self._options.game))
        _check_game(name, f"the field game of the task {task.id}")
        thread = EpisodeThread()
        game = _Game(name, self._options)
        try:
            first = await thread.call(game.start, task.seed, deadline_s=self._options.step_s)
            messages = begin(first, self._options.system_prompt)

            async def reply(answer: AgentAnswer) -> TurnReply:
                said, is_done = await thread.call(game.step, answer.content, deadline_s=self._options.step_s)
                return TurnReply(said, None, is_done)

            turns = await play(episode, messages, reply, self._options.max_turns, f"textarena {name}")
            reward, measures = await thread.call(game.end, deadline_s=self._options.step_s)
            return outcome(reward, {**measures, "steps": float(turns)}) if turns else None
        finally:
            await thread.close()


class _Game:
    """One game, with its own course of the random numbers that all games draw from."""

    def __init__(self, name: str, options: TextArenaOptions) -> None:
        self._name = name
        self._options = options
        self._draws = _Draws(0)
        self._env: Any = None

    def start(self, seed: int) -> list[Message]:
        """Make the game, and return what it says first."""
        import textarena

        def begin_game() -> Any:
            self._env = textarena.make(self._name, **self._options.arguments)
            while isinstance(self._env, textarena.core.ObservationWrapper):  # they repeat what the model has read
                self._env = self._env.env
            self._unwrap_below(textarena)
            self._env.reset(num_players=1, seed=seed)

        self._draws = _Draws(seed)
        self._drawing(begin_game)
        return self._said()

    def _unwrap_below(self, textarena: Any) -> None:
        """Take wrappers of observations off that lie below others, such as those of actions."""
        above = self._env
        while isinstance(above, textarena.core.Wrapper):
            while isinstance(above.env, textarena.core.ObservationWrapper):
                above.env = above.env.env
            above = above.env

    def step(self, action: str) -> tuple[list[Message], bool]:
        """Make a move; return what the game says, and whether it is over."""
        result = self._drawing(lambda: self._env.step(action=action))
        if not isinstance(result, tuple) or len(result) != 2:
            raise ShapeError(f"textarena {self._name}: step returned {result!r:.200}; it must return (done, info).")
        is_done = truth(result[0], f"textarena {self._name}: done")
        return self._said(), is_done

    def end(self) -> tuple[float, dict[str, float]]:
        """Close the game; return the player's reward, which is 0 for a game that was not ended, and measures."""
        result = self._drawing(self._env.close)
        if not isinstance(result, tuple) or len(result) != 2:
            raise ShapeError(f"textarena {self._name}: close returned {result!r:.200}; it must return (rewards, info).")
        rewards, info = result
        player = info.get(0, {}) if isinstance(info, Mapping) else {}
        reward = _reward(rewards, player, f"textarena {self._name}: its reward")
        return reward, {"ended": float(bool(rewards)), "invalid_move": float(bool(player.get("invalid_move")))}

    def _said(self) -> list[Message]:
        player, said = self._drawing(self._env.get_observation)
        if player != 0 or not isinstance(said, Sequence) or isinstance(said, str):
            raise ShapeError(
                f"textarena {self._name}: get_observation returned {said!r:.200} for player {player!r}; only games for"
                " one player are played, without wrappers of observations."
            )
        lines = [str(text) for sender, text, _ in said if sender != player]
        text = "\n".join(lines).strip()
        return [{"role": "user", "content": cut(text, self._options.max_observation_chars)}] if text else []

    def _drawing(self, function: Any) -> Any:
        """Call a function of the game with the game's own course of random numbers."""
        with DRAWS:
            self._draws.swap()
            try:
                return function()
            finally:
                self._draws.swap()


class _Draws:
    """A course of the random numbers of Python and numpy, which are one for the whole process."""

    def __init__(self, seed: int) -> None:
        self._state = random.Random(seed).getstate(), numpy.random.RandomState(seed % 2**32).get_state()

    def swap(self) -> None:
        """Draw from this course from now on, and keep what was drawn from before."""
        own, self._state = self._state, (random.getstate(), numpy.random.get_state())
        random.setstate(own[0])
        numpy.random.set_state(own[1])


def _reward(rewards: Any, player: Mapping[str, Any], what: str) -> float:
    if not rewards:
        return 0.0
    reward = rewards[0]
    if isinstance(reward, str):  # some games of 0.7 give an invalid move's reason in place of its reward, and reversed
        with suppress(ValueError):
            reward = float(str(player.get("reason")).rpartition(": ")[2])
    return finite(reward, what)


def _check_game(name: str, where: str) -> None:
    from textarena.envs.registration import ENV_REGISTRY

    from headway.broker.user_code.kinds import did_you_mean

    if name not in ENV_REGISTRY:
        raise ConfigError(f"{where}: TextArena has no game {name!r}{did_you_mean(name, ENV_REGISTRY) or '.'}")
