"""`skyrl_gym`: an environment in the shape of SkyRL-Gym's BaseTextEnv, yours or one of that package.

Its class is called with `env_config` and `extras`, as far as it takes them: `extras` has the fields of the task's row.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from headway.broker.errors import ConfigError
from headway.broker.installation import check_extra
from headway.broker.user_code.import_paths import ImportRoots
from headway.rollout_workers.agents.conversation import Message, begin
from headway.rollout_workers.agents.episode import Agent, AgentAnswer, AgentEpisode, AgentTask, Outcome
from headway.rollout_workers.agents.tools.threads import EpisodeThread, made_in_thread
from headway.rollout_workers.agents.tools.toolbox import Count, Seconds

from .base import (
    Settings,
    ShapeError,
    accepted,
    check_methods,
    finite,
    messages_of,
    numbers_of,
    outcome,
    resume_of,
    row_of,
    truth,
)
from .turns import TurnReply, play

SHAPE = "a dict with observations, reward, done and metadata"


class SkyrlGymOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The environment, and its limits."""

    environment: str
    """package.module:Class; or the name of one that the package skyrl-gym has registered, such as gsm8k."""
    env_config: dict[str, Any] = {}
    """Its settings, whose values it reads as attributes or as items."""
    system_prompt: str = ""
    """What the model reads first."""
    max_turns: Count = 50
    """The most answers of the model, which the environment is told, too."""
    step_s: Seconds = 60.0
    """A call that takes longer ends its episode."""


class SkyrlGymAgent(Agent):
    """Makes an environment for each episode. Rewards are those of single turns."""

    def __init__(self, options: SkyrlGymOptions, roots: ImportRoots, where: str) -> None:
        self._options = options
        self._key = f"{where}.environment"
        self._make = _class_of(options.environment, roots, self._key)
        check_methods(self._make, ["init", "step"], "an environment of SkyRL-Gym's shape", self._key)
        self.resume = resume_of(self._make, self._key)

    async def rollout(self, episode: AgentEpisode, task: AgentTask) -> Outcome:
        """Play one episode."""
        given = {"env_config": Settings(self._options.env_config), "extras": self._extras(task)}
        given = accepted(self._make, given, self._options.environment)
        async with made_in_thread(self._make, self._options.step_s, given) as (own, thread):
            return await self._play(own, thread, episode, task)

    async def _play(self, own: Any, thread: EpisodeThread, episode: AgentEpisode, task: AgentTask) -> Outcome:
        options, what = self._options, f"{self._options.environment}: step"
        begun = await thread.call(own.init, begin(task.messages, options.system_prompt), deadline_s=options.step_s)
        messages = _begun(begun, f"{options.environment}: init")

        async def reply(answer: AgentAnswer) -> TurnReply:
            step = await thread.call(own.step, answer.content, deadline_s=options.step_s)
            if not isinstance(step, Mapping) or not {"observations", "reward", "done"} <= step.keys():
                raise ShapeError(f"{what} returned {step!r:.200}; it must return {SHAPE}.")
            said: list[Message] = messages_of(step["observations"] or [], f"{what}: observations")
            return TurnReply(said, finite(step["reward"], f"{what}: reward"), truth(step["done"], f"{what}: done"))

        turns = await play(episode, messages, reply, options.max_turns, what)
        told = await thread.call(own.get_metrics, deadline_s=options.step_s) if hasattr(own, "get_metrics") else {}
        return outcome(0.0, {**numbers_of(told), "steps": float(turns)}) if turns else None

    def _extras(self, task: AgentTask) -> dict[str, Any]:
        """Return the row, with the ground truth where SkyRL's and verl's environments look for it."""
        truth = {"ground_truth": task.ground_truth}
        ours = {"reward_spec": truth, "reward_model": truth, "max_turns": self._options.max_turns}
        return {**ours, **row_of(task)}


def _class_of(environment: str, roots: ImportRoots, where: str) -> Any:
    if ":" in environment:
        return roots.load(environment, where)
    check_extra("skyrl-gym", "skyrl_gym", f"{where}={environment}", name="skyrl-gym")
    import skyrl_gym
    from skyrl_gym.envs.registration import load_env_creator

    if environment not in skyrl_gym.registry:
        known = ", ".join(sorted(skyrl_gym.registry))
        raise ConfigError(
            f"{where}: skyrl-gym has no {environment!r}. Known: {known}; your own as package.module:Class."
        )
    entry = skyrl_gym.registry[environment].entry_point
    return load_env_creator(entry) if isinstance(entry, str) else entry


def _begun(result: Any, what: str) -> list[Message]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise ShapeError(f"{what} returned {result!r:.200}; it must return (messages, info).")
    return messages_of(result[0], f"{what}: its messages")
