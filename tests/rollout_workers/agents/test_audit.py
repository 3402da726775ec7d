"""A thousand random episodes, checked against the engine's own record by code that shares nothing with the recorder.

Agents call tools, branch, ask in parallel, rewrite their history, ask for titles, retry lost calls, run out of tokens
and of time, and are killed and run again, at times to do something else. Each token that is trained must be one that
the engine sampled after exactly that context, with that logprob; each turn that the agent saw is trained once, and no
other.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from headway.broker.schema import Segment
from headway.broker.wire.codec import decode_segment, decode_trajectory, encode_segment, encode_trajectory
from headway.broker.wire.rows import rows_of
from headway.rollout_workers.agents.calls import CallRefusedError, ChatAnswer, ChatCall, SessionEndedError
from headway.rollout_workers.agents.conversation import Tool
from headway.rollout_workers.config import AgentConfig
from headway.rollout_workers.engines.base import Chunk, GenerationRequest
from headway.rollout_workers.samples.recorder import Recorder

from .sessions import END, LEASE, TID, Attempt, Engine, tokens

EPISODES = 1000
MOST_TOKENS = 700

Sampled = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]
"""What the model read, what it sampled, and the logprobs."""


class RecordingEngine(Engine):
    """Samples random words, and keeps a record of its own."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng
        self.record: list[Sampled] = []

    def answer(self) -> list[int]:
        """Return what is sampled if nothing cuts it."""
        return [*tokens("".join(self.rng.choice("abc!") for _ in range(self.rng.randrange(1, 9)))), END]

    async def generate(self, request: GenerationRequest, recorder: Recorder) -> None:
        """Record one turn."""
        for _ in range(self.rng.randrange(4)):
            await asyncio.sleep(0)
        answer = self.answer()
        sampled = answer[: request.max_new_tokens]
        logprobs = [-self.rng.random() for _ in sampled]
        reason: Any = "stop" if len(sampled) == len(answer) else "length"
        if self.rng.random() < 0.03:  # what was sampled until the call's time was up is lost
            recorder.add(Chunk(token_ids=sampled, logprobs=logprobs, version=self.version, finish_reason="interrupted"))
            raise TimeoutError
        self.record.append((tuple(request.prompt_tokens), tuple(sampled), tuple(logprobs)))
        recorder.add(Chunk(token_ids=sampled, logprobs=logprobs, version=self.version, finish_reason=reason))


class KilledError(Exception):
    """The worker of this attempt was killed."""


class WanderingAgent:
    """Does the same with the same seed and answers, at every attempt; `seen` are the turns whose answers it has, and
    `asked` their calls."""

    tools: Sequence[Tool] = ()

    def __init__(self, seed: float, attempt: Attempt, calls_left: int) -> None:
        self._rng = random.Random(seed)
        self._session = attempt.session
        self._calls_left = calls_left
        self.seen: list[tuple[str, ChatAnswer]] = []
        self.asked: dict[str, ChatCall] = {}

    async def play(self) -> None:
        """Ask for a few turns, in one way or another."""
        history: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
        for number in range(self._rng.randrange(1, 7)):
            match self._rng.choice(
                ["on", "on", "on", "fork", "both", "rewrite", "title", "tokens", "retry", "subagent"]
            ):
                case "fork":
                    await self._ask([*history, {"role": "user", "content": f"aside {number}"}])
                case "both":
                    await asyncio.gather(self._ask(history, cap=6), self._ask(history, cap=6))
                case "rewrite" if len(history) > 2 and history[2]["role"] == "user":
                    history = [*history[:1], {"role": "assistant", "content": "made up"}, *history[2:]]
                case "title":
                    system = {"role": "system", "content": "a title, please"}
                    await self._ask([system, *history[:1]], role="auxiliary")
                case "tokens":
                    await self._ask([], prompt=tokens(f"raw {number}"))
                case "retry":
                    await self._ask(history, loses=True)
                case "subagent":
                    await self._ask([{"role": "user", "content": f"look {number}"}])
            answer = await self._ask(history)
            if answer is None:
                continue
            if not answer.token_ids:
                return
            history = [*history, answer.message, *self._following(answer.message, number)]

    def _following(self, message: dict[str, Any], number: int) -> list[dict[str, Any]]:
        """Return the results of an answer's tools, or what the user says next."""
        calls = message.get("tool_calls") or []
        results = [{"role": "tool", "tool_call_id": one["id"], "content": f"found {number}"} for one in calls]
        return results or [{"role": "user", "content": f"more {number}"}]

    async def _ask(
        self,
        messages: list[dict[str, Any]],
        *,
        role: Any = "main",
        prompt: list[int] | None = None,
        cap: int | None = None,
        loses: bool = False,
    ) -> ChatAnswer | None:
        """Return an answer; None where the model had no time to give one."""
        if self._calls_left <= 0:
            raise KilledError
        self._calls_left -= 1
        tools = [] if role == "auxiliary" or prompt else list(self.tools)
        call = ChatCall(messages=messages, tools=tools, prompt_token_ids=prompt, role=role, max_tokens=cap)
        try:
            answer = await self._session.chat(call)
        except CallRefusedError as error:
            if "turn_s" not in str(error):
                raise
            return None
        if loses:
            self._session.note_lost(answer)
            answer = await self._session.chat(call)
        self.seen.append((role, answer))
        self.asked[answer.id] = call
        return answer


async def played(
    seed: int,
    engine: RecordingEngine | None = None,
    kind: type[WanderingAgent] = WanderingAgent,
    *,
    room: Sequence[int] = (60, MOST_TOKENS, MOST_TOKENS),
    **session: Any,
) -> tuple[Attempt, RecordingEngine, WanderingAgent]:
    """Play an episode, which is killed up to twice. `room`: the tokens that it may have, of which one is drawn."""
    rng = random.Random(seed)
    engine, segments = engine or RecordingEngine(rng), list[Segment]()
    config = AgentConfig(kind="test", max_turns=rng.choice([3, 64]))
    for kills in (rng.randrange(1, 6), rng.randrange(1, 9), 10_000):
        calls_left = kills if rng.random() < 0.5 else 10_000
        attempt = Attempt(engine, *segments, config=config, most_tokens=rng.choice(room), **session)
        agent = kind(seed if rng.random() < 0.8 else rng.random(), attempt, calls_left)
        try:
            await agent.play()
            break
        except KilledError:
            attempt.session.end()
            segments = [decode_segment(encode_segment(one)) for one in attempt.segments]
    attempt.session.settle()
    return attempt, engine, agent


def audit(attempt: Attempt, record: list[Sampled], seen: list[tuple[str, ChatAnswer]]) -> int:
    """Compare an episode with the engine's record and with what the agent saw. Returns its trained tokens."""
    trajectory = decode_trajectory(encode_trajectory(attempt.recorder.to_trajectory(LEASE, {}, 1.0, "w")))
    known = {(read + sampled[:at], token): logprob for read, sampled, logprobs in record for at, (token, logprob) in
             enumerate(zip(sampled, logprobs, strict=True))}  # fmt: skip
    every = Counter((read, sampled) for read, sampled, _ in record)
    trained = 0
    for row in rows_of(trajectory):
        ids = tuple(row.token_ids.tolist())
        for place, position in enumerate(row.positions.tolist(), row.context_length):
            if not trajectory.loss_mask[position]:
                continue
            trained += 1
            at = (ids[:place], ids[place])
            assert at in known, f"token {position} was never sampled after these {place} tokens"
            if sum(read == at[0] for read, _ in every) < 2:  # the same context may have been sampled twice
                logprobs = {lp for read, sampled, lps in record for n, lp in enumerate(lps)
                            if read + sampled[:n] == at[0] and sampled[n] == at[1]}  # fmt: skip
                assert any(abs(lp - float(trajectory.behavior_logprobs[position])) < 1e-6 for lp in logprobs)
    main = [answer for role, answer in seen if role == "main" and answer.token_ids]
    assert trained == sum(len(answer.token_ids) for answer in {answer.id: answer for answer in main}.values())
    assert len({answer.id for answer in main}) == len(main), "two calls got one turn"
    return trained


@pytest.mark.parametrize("part", range(4))
async def test_random_episodes_are_what_the_engine_sampled(part: int) -> None:
    trained, counts = 0, Counter[str]()
    for seed in range(part * EPISODES // 4, (part + 1) * EPISODES // 4):
        try:
            attempt, engine, agent = await played(seed)
        except SessionEndedError as error:
            raise AssertionError(f"episode {seed}") from error
        if attempt.recorder.newest_main() is None:
            continue
        try:
            trained += audit(attempt, engine.record, agent.seen)
        except AssertionError as error:
            raise AssertionError(f"episode {seed}: {error}") from error
        counts += attempt.session.counts
    assert trained > EPISODES
    assert {"forks", "auxiliary_turns", "over_budget", "resumed", "repeated", "unseen_turns", "turn_timeouts"} <= set(
        counts
    )


def test_the_segments_of_an_episode_have_its_name() -> None:
    assert str(TID) == str(LEASE.tid)
