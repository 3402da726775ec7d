"""`verl_agent_loop`: a class in the shape of verl's AgentLoop (0.9), which keeps tokens itself.

    class Loop:
        def __init__(self, trainer_config, server_manager, tokenizer, processor, ...): ...
        async def run(self, sampling_params, **row) -> AgentLoopOutput: ...

`server_manager.generate` samples from the run's engine. Tokens are trained as the engine sampled them, whatever the
output says of them; of the output, `reward_score`, `num_turns` and numbers in `extra_fields` are read.
"""

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headway.broker.errors import ConfigError
from headway.broker.user_code.import_paths import ImportRoots
from headway.rollout_workers.agents.episode import Agent, AgentAnswer, AgentEpisode, AgentTask, Outcome
from headway.rollout_workers.agents.tools.threads import EpisodeThread
from headway.rollout_workers.agents.tools.toolbox import Seconds

from .base import Settings, ShapeError, accepted, check_methods, finite, numbers_of, outcome, resume_of, row_of

LENGTHS = ("max_tokens", "max_new_tokens")
"""The settings of a call that are honoured; the run's own decide over all others."""


class VerlAgentLoopOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The class, and what it is given."""

    loop: str
    """The class: package.module:Class."""
    tokenizer: str = ""
    """Where the class reads a tokenizer: the directory or name of the model; "": it gets None."""
    trainer_config: dict[str, Any] = {}
    """The part of verl's configuration that it reads, as attributes or as items."""
    sampling_params: dict[str, Any] = {}
    """What `run` is given, to be passed on to `generate`. The run's own settings decide how tokens are sampled."""
    make_s: Seconds = 60.0
    """Making an object may take so long."""


class TokenOutput(msgspec.Struct, kw_only=True):
    """What `server_manager.generate` returns."""

    token_ids: list[int]
    log_probs: list[float]
    stop_reason: str
    """completed, or aborted where the episode has no room for more tokens."""
    routed_experts: None = None
    num_preempted: int = 0
    extra_fields: dict[str, Any] = {}


class ServerManager:
    """Samples tokens of one episode."""

    def __init__(self, episode: AgentEpisode, sampling_params: Mapping[str, Any]) -> None:
        self._episode = episode
        self._sampling_params = sampling_params

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> TokenOutput:
        """Have the model go on after the tokens. Raises ShapeError for images and for changed settings."""
        media = [name for name, value in others.items() if name.endswith("_data") and value]
        if media:
            raise ShapeError(f"verl_agent_loop: generate was given {', '.join(media)}; only text is supported.")
        answer = await self._episode.generate(
            list(map(int, prompt_ids)), max_tokens=self._length(sampling_params or {})
        )
        return _output(answer)

    def _length(self, given: Mapping[str, Any]) -> int | None:
        changed = [
            name for name, value in given.items() if name not in LENGTHS and self._sampling_params.get(name) != value
        ]
        if changed:
            raise ShapeError(
                f"verl_agent_loop: generate was given {', '.join(sorted(changed))} unlike what run was given; how"
                " tokens are sampled is set for the whole run, by the recipe's sampling."
            )
        lengths = [int(given[name]) for name in LENGTHS if given.get(name) is not None]
        return min(lengths) if lengths else None


class VerlAgentLoopAgent(Agent):
    """Makes an object for each episode."""

    def __init__(self, options: VerlAgentLoopOptions, roots: ImportRoots, where: str) -> None:
        self._options = options
        self._class = roots.load(options.loop, f"{where}.loop")
        check_methods(self._class, ["run"], "an AgentLoop of verl's shape", f"{where}.loop")
        if not inspect.iscoroutinefunction(inspect.unwrap(self._class.run)):
            raise ConfigError(f"{where}.loop: {options.loop}: write async def run(self, sampling_params, **row).")
        self.resume = resume_of(self._class, f"{where}.loop")
        self._tokenizer = _tokenizer(options.tokenizer, f"{where}.tokenizer") if options.tokenizer else None
        self._model_type = _model_type(options.tokenizer) if options.tokenizer else None

    async def rollout(self, episode: AgentEpisode, task: AgentTask) -> Outcome:
        """Play one episode."""
        options, thread, loop = self._options, EpisodeThread(), asyncio.get_running_loop()

        def make(**given: Any) -> Any:
            asyncio.set_event_loop(loop)  # verl's own class keeps the loop of the thread in which it is made
            return self._class(**given)

        try:
            given = accepted(self._class, self._parts(episode), options.loop)
            own = await thread.call(make, deadline_s=options.make_s, **given)
        finally:
            await thread.close()
        row = {**row_of(task), "raw_prompt": task.messages, "index": task.id, "extra_info": dict(task.extra_info)}
        result = await own.run(dict(options.sampling_params), **row)
        reward, turns = _read(result, "reward_score"), _read(result, "num_turns")
        if not isinstance(turns, int) or not isinstance(_read(result, "response_ids"), Sequence):
            raise ShapeError(
                f"{options.loop}: run returned {result!r:.200}; it must return an AgentLoopOutput with prompt_ids,"
                " response_ids, response_mask, num_turns, reward_score and extra_fields."
            )
        measures = {**numbers_of(_read(result, "extra_fields")), "num_turns": float(turns)}
        return outcome(None if reward is None else finite(reward, f"{options.loop}: reward_score"), measures)

    def _parts(self, episode: AgentEpisode) -> dict[str, Any]:
        config = Settings(self._options.trainer_config)
        return {
            "trainer_config": Settings({"config": config}),
            "server_manager": ServerManager(episode, self._options.sampling_params),
            "tokenizer": self._tokenizer,
            "processor": None,
            "dataset_cls": None,
            "data_config": Settings({"config": config.get("data", {})}),
            "hf_model_type": self._model_type,
        }


def _output(answer: AgentAnswer) -> TokenOutput:
    stop = "aborted" if answer.is_over else "completed"
    return TokenOutput(token_ids=list(answer.token_ids), log_probs=list(answer.logprobs), stop_reason=stop)


def _read(result: Any, name: str) -> Any:
    return result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)


def _tokenizer(path: str, where: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: {path!r} has no tokenizer: {error}.") from error


def _model_type(path: str) -> str | None:
    """Return the model's type, by which verl knows what its template writes between turns; None where it is unknown."""
    from transformers import PretrainedConfig

    try:
        found: dict[str, Any] = PretrainedConfig.get_config_dict(path)[0]
    except OSError:
        return None
    return found.get("model_type")
