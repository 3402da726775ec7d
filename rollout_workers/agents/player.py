"""Plays samples by an agent: a `samples.episode.Player`. It serves the endpoint that the agents of its worker call."""

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

from headway.broker.errors import CallDeadlineError, UserCodeError
from headway.broker.schema import Prompt, Segment
from headway.broker.schema.agent_measures import PREFIX, is_reserved
from headway.broker.schema.status import AgentInfo
from headway.broker.user_code.import_paths import ImportRoots
from headway.broker.user_code.kinds import typed_options
from headway.broker.user_code.pool import HostLostError
from headway.broker.wire.rows import is_of_agent
from headway.rollout_workers.config import AgentConfig
from headway.rollout_workers.decoding import Decoding
from headway.rollout_workers.rewards.base import CallFailures, DroppedMeasures, Reward
from headway.rollout_workers.rewards.built_in import ZeroReward
from headway.rollout_workers.samples.episode import NO_TRACER, PlayedSample, SampleTrace, ScoredTurn
from headway.rollout_workers.samples.recorder import Recorder

from .calls import Session, SessionAwayError, SessionEndedError
from .conversation import ChatFormat
from .endpoint.connections import EndpointSettings
from .endpoint.server import Endpoint
from .episode import AgentTask
from .external import EXTERNAL, ExternalAgents
from .formats import open_format
from .formats.options import AgentFormatOptions
from .hosted import AgentHosts, Played
from .session import EpisodeSession
from .tally import EpisodeTally, measures_of
from .tree import EpisodeRecorder

FEW_SESSIONS, COUNT_S = 64, 0.05
"""Sessions that are counted whenever they are asked for, and the seconds between two counts of more."""
log = logging.getLogger(__name__)


class AgentPlayer:
    """Has agents play samples, each in a session of its own."""

    def __init__(
        self,
        config: AgentConfig,
        agents: AgentHosts | ExternalAgents,
        endpoint: Endpoint,
        sessions: "OpenSessions",
        reward: Reward,
        chat_format: ChatFormat,
        decoding: Decoding,
        *,
        model: str,
        trained_temperature: float | None = None,
    ) -> None:
        """`trained_temperature`: that of training, which agents may ask for in evaluations too."""
        self.most_at_once = config.episodes_per_place
        self._config = config
        self._agents = agents
        self._endpoint = endpoint
        self._sessions = sessions
        self._reward = reward
        self._format = chat_format
        self._decoding = decoding
        self._model = model
        self._trained_temperature, self._is_temperature_told = trained_temperature, False
        self._tally, self._is_taken_told = EpisodeTally(), False
        self._waiting, self._count_again_s = 0, 0.0
        self._dropped = DroppedMeasures(f"agent {config.kind}")
        self._failures = CallFailures(
            f"agent {config.kind}",
            "Mend the agent, or set agent.on_failure=zero to train failed episodes with a reward of 0.",
            config.episode_s,
            failure="failed",
        )

    @classmethod
    async def open(
        cls,
        config: AgentConfig,
        reward: Reward,
        decoding: Decoding,
        *,
        model: Path,
        name: str,
        trained_temperature: float | None = None,
        roots: ImportRoots | None = None,
    ) -> "AgentPlayer":
        """Open the agent, its chat format and the endpoint. `model`: the directory of the model's tokenizer; `name`:
        what the endpoint calls the model. Raises ConfigError, UserCodeError."""
        options = typed_options(config.format.options, AgentFormatOptions, "agent.format.options")
        chat_format = open_format(model, decoding.stop_token_ids, config.format.kind, options=options, roots=roots)
        settings = EndpointSettings(ignore_sampling=config.ignore_sampling, call_s=config.episode_s)
        external = ExternalAgents(absent_s=config.episode_s) if config.kind == EXTERNAL else None
        sessions = OpenSessions(external)
        endpoint = await Endpoint.start(sessions, config.host, config.port, settings, external)
        try:
            agents = external or await AgentHosts.open(config, roots or ImportRoots())
        except BaseException:
            await endpoint.close()
            raise
        opened = agents, endpoint, sessions, reward, chat_format, decoding
        return cls(config, *opened, model=name, trained_temperature=trained_temperature)

    @property
    def waiting_for_tools(self) -> int:
        """See Player. A worker asks again and again, so many sessions are counted at intervals."""
        sessions, now = self._sessions.open.values(), time.monotonic()
        if len(sessions) <= FEW_SESSIONS or now >= self._count_again_s:
            self._waiting = sum(one.waits_for_tools for one in sessions)
            self._count_again_s = now + COUNT_S
        return self._waiting

    @property
    def agent(self) -> AgentInfo:
        """See Player."""
        return self._tally.report(list(self._sessions.open.values()), self._endpoint.refused.all)

    def resumes(self, segments: Sequence[Segment]) -> bool:
        """See Player."""
        return self._agents.resume == "replay" and all(is_of_agent(segment.turns) for segment in segments)

    def recorder(self, prompt: Prompt, segments: Sequence[Segment] = (), *, records_experts: bool = False) -> Recorder:
        """See Player."""
        return EpisodeRecorder(segments, prompt=prompt.token_ids)

    async def play(self, sample: PlayedSample, trace: SampleTrace = NO_TRACER) -> ScoredTurn | None:
        """See Player. Raises EngineFailedError where the engine fails at a call."""
        recorder = sample.recorder
        assert isinstance(recorder, EpisodeRecorder)
        session, name = self._opened(sample, recorder)
        session.counts["restarted"] += recorder.begins_anew
        self._sessions.open[name] = session
        try:
            with trace.generating():
                reward, measures, reason = await self._played(sample, session, name)
        finally:
            session.settle()
            name = self._sessions.forget(session)
            self._tally.note_left(session)
            self._tell_temperature(session)
            refused = self._endpoint.refused.take(name)
        with trace.scoring():
            scored = await self._scored(sample.prompt, recorder, reward)
        self._tally.note_finished(recorder)
        measures |= measures_of(session, recorder, reason, refused)
        return ScoredTurn(scored.reward, scored.components | measures, ())

    def _tell_temperature(self, session: EpisodeSession) -> None:
        """Tell once that an evaluation samples otherwise than its agents ask."""
        if session.counts["replaced_temperature"] and not self._is_temperature_told:
            self._is_temperature_told = True
            log.warning(
                "agent %s asks for temperature %g, that of training, in an evaluation too: evaluation.temperature wins"
                " there, and agent/replaced_temperature counts such calls",
                self._config.kind,
                self._trained_temperature,
            )

    def _opened(self, sample: PlayedSample, recorder: EpisodeRecorder) -> tuple[EpisodeSession, str]:
        """Return a session with its name, which is its secret."""
        name, end = secrets.token_urlsafe(24), None
        attempt = next((turn.call.attempt for turn in reversed(recorder.turns) if turn.call), "")
        if isinstance(self._agents, ExternalAgents):
            attempt = attempt or secrets.token_hex(8)
            name = self._agents.name_of(_sample_name(sample), attempt)
            end = partial(self._agents.finish, name)
        session = EpisodeSession(
            sample,
            recorder,
            self._format,
            self._config,
            model=self._model,
            text_of=self._decoding.decode,
            vocabulary=self._decoding.vocabulary,
            trained_temperature=self._trained_temperature,
            attempt=attempt,
            end=end,
        )
        return session, name

    async def score_turn(
        self, prompt: Prompt, recorder: Recorder, room: int, trace: SampleTrace = NO_TRACER
    ) -> ScoredTurn:
        """See Player: `play` leaves no turn to be scored."""
        raise AssertionError("an agent's episode is scored when it is played")

    async def close(self) -> None:
        """See Player."""
        for session in self._sessions.open.values():
            session.end()
        await self._endpoint.close()
        await self._agents.close()
        await self._reward.close()

    async def _played(
        self, sample: PlayedSample, session: EpisodeSession, name: str
    ) -> tuple[float | None, dict[str, float], str]:
        """Return the agent's reward and measures, and the reason for which it failed, if it did and is to get 0."""
        failure: UserCodeError | None = None
        reward, measures, left_out = None, dict[str, float](), list[str]()
        try:
            reward, measures, left_out = await self._unless_failed(sample, session, name)
        except UserCodeError as error:
            failure = error
        session.settle()
        recorder = _with_turns(sample.recorder)
        if recorder is None:
            failure = failure or UserCodeError("ended without a turn that could be trained")
        if failure is None:
            self._failures.note_success()
            return reward, self._kept(measures, left_out), ""
        reason = "no_turn" if recorder is None else _reason(failure)
        self._tally.note_failed(reason)
        if recorder is None or self._config.on_failure == "again":
            raise self._failures.note(sample.prompt, failure) from failure
        kind, group = self._config.kind, sample.prompt.group
        log.warning("agent %s on prompt %r: it %s. Its turns are trained with a reward of 0.", kind, group, failure)
        recorder.clear_rewards()
        return 0.0, {}, reason

    def _kept(self, measures: dict[str, float], left_out: list[str]) -> dict[str, float]:
        """Return an agent's own measures as the trajectory names them, without those that have a name of ours."""
        taken = sorted(name for name in measures if is_reserved(name))
        if taken and not self._is_taken_told:
            self._is_taken_told = True
            names = ", ".join(taken)[:200]
            log.warning(
                "agent %s: Headway's own measures are called %s; call yours otherwise", self._config.kind, names
            )
        kept = self._dropped.note({n: value for n, value in measures.items() if n not in taken}, left_out)
        return {f"{PREFIX}{name}": value for name, value in kept.items()}

    async def _unless_failed(self, sample: PlayedSample, session: EpisodeSession, name: str) -> Played:
        """Return what the agent returned. Raises the engine's failure at once, whatever the agent does."""
        playing = asyncio.ensure_future(self._playing(sample, session, name))
        try:
            either: list[asyncio.Future[Any]] = [playing, session.failure]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if session.failure.done():
                session.failure.result()
            return await playing
        finally:
            playing.cancel()

    async def _playing(self, sample: PlayedSample, session: EpisodeSession, name: str) -> Played:
        task, deadline_s = _task(sample), self._config.episode_s
        if isinstance(self._agents, ExternalAgents):
            is_resumed = isinstance(sample.recorder, EpisodeRecorder) and sample.recorder.resumed > 0
            take_over = partial(self._taken_over, sample, session, self._agents) if is_resumed else None
            return await self._agents.play(task, name, session.called, take_over=take_over, deadline_s=deadline_s)
        url = self._endpoint.url_of(name)
        again = session.begin_again if self._agents.resume == "replay" else session.begin_anew
        return await self._agents.play(task, url, name, deadline_s=deadline_s, on_lost=again)

    def _taken_over(self, sample: PlayedSample, session: EpisodeSession, agents: ExternalAgents) -> str:
        """Let another agent play a session, and return its new name."""
        attempt = secrets.token_hex(8)
        name = agents.name_of(_sample_name(sample), attempt)
        self._endpoint.refused.take(self._sessions.forget(session))
        self._sessions.open[name] = session
        session.begin_again(attempt)
        return name

    async def _scored(self, prompt: Prompt, recorder: EpisodeRecorder, reward: float | None) -> ScoredTurn:
        """Return the episode's reward beside its turns': the agent's, or, where it has none, that of the run's reward
        functions for the last answer."""
        if reward is not None:
            return ScoredTurn(reward, {}, ())
        if isinstance(self._reward, ZeroReward):
            error = UserCodeError("returned no reward, and the recipe has no rewards that could score the answer")
            self._tally.note_failed("no_reward")
            raise self._failures.note(prompt, error)
        last = recorder.newest_main()
        assert last is not None
        turn = recorder.turn(last)
        text = self._format.parse(turn.token_ids, ()).content
        score = await self._reward.score(prompt, text, turn.call.finish_reason, recorder.tokens)
        return ScoredTurn(score.total, dict(score.components), ())


def _with_turns(recorder: Recorder) -> EpisodeRecorder | None:
    """Return an agent's recorder, if it has a turn that may be trained."""
    return recorder if isinstance(recorder, EpisodeRecorder) and recorder.newest_main() is not None else None


class OpenSessions:
    """The sessions under way, by their names: an implementation of `calls.Sessions`."""

    def __init__(self, external: ExternalAgents | None = None) -> None:
        """`external` are agents that outlive their worker: a session that is not open may be opened yet."""
        self.open: dict[str, EpisodeSession] = {}
        self._external = external

    def forget(self, session: EpisodeSession) -> str:
        """Close a session, and return its name."""
        name = next(name for name, one in self.open.items() if one is session)
        del self.open[name]
        return name

    def session(self, name: str) -> Session:
        """See Sessions."""
        if name not in self.open and self._may_come_back(name):
            raise SessionAwayError("there is no such session now; repeat the call until a worker has its episode again")
        if name not in self.open:
            raise SessionEndedError("there is no such session; its episode has ended, or another worker plays it now")
        return self.open[name]

    def _may_come_back(self, name: str) -> bool:
        return self._external is not None and self._external.may_come_back(name)


def _sample_name(sample: PlayedSample) -> str:
    """Return the name of a sample without its attempt."""
    return sample.request.request_id.rpartition(":")[0]


def _task(sample: PlayedSample) -> AgentTask:
    prompt = sample.prompt
    return AgentTask(
        id=prompt.group,
        text=prompt.text,
        messages=prompt.messages or [{"role": "user", "content": prompt.text}],
        ground_truth=prompt.ground_truth,
        data_source=prompt.data_source,
        extra_info=prompt.extra_info,
        sample=sample.number,
        seed=crc32(prompt.group.encode()),
    )


def _reason(error: UserCodeError) -> str:
    """Return a word for why an agent failed."""
    if isinstance(error, CallDeadlineError):
        return "timeout"
    return "lost" if isinstance(error, HostLostError) else "raised"
