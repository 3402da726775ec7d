"""One worker or scorer process: the product's, with a double of the engine or of the reward model.

The engine's double streams each sample slowly, swaps between two tokens, and counts its tokens; the worker's client
repeats itself and forgets. The audit can compute the score of the reward model's double.
"""

import asyncio
import ctypes
import os
import random
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import msgspec
import numpy as np
import torch

import headway.rollout_workers.agents.player
import headway.rollout_workers.scorers.runtimes
import headway.rollout_workers.worker
from headway.broker.client import broker as client
from headway.broker.client.broker import open_broker
from headway.broker.client.leases import Leases, SubmitOutcome
from headway.broker.client.scoring import Scores
from headway.broker.client.status import HeartbeatReply, StatusVerbs
from headway.broker.errors import BrokerError, ForeignRunError, WeightSyncError
from headway.broker.schema import Lease, ScoreRequest, Trajectory, TrajectoryId, WeightVersion
from headway.broker.schema.status import WorkerInfo
from headway.broker.schema.weights import WeightManifest
from headway.deploy.roles import scorer as scoring
from headway.deploy.roles import worker as rollout
from headway.deploy.roles.config_watch import ConfigChangedError
from headway.rollout_workers.agents import external
from headway.rollout_workers.agents.session import EpisodeSession
from headway.rollout_workers.agents.tree import EpisodeRecorder
from headway.rollout_workers.config import EngineConfig, ScorersConfig
from headway.rollout_workers.engines.abilities import EngineAbilities
from headway.rollout_workers.engines.base import (
    Check,
    Chunk,
    FinishReason,
    GenerationRequest,
    NamedTensors,
    Parts,
    WeightFingerprints,
)
from headway.rollout_workers.samples.episode import PlayedSample
from headway.rollout_workers.worker import Worker
from headway.weightsync import receiver
from headway.weightsync.deliveries import BufferPool, BufferSet
from headway.weightsync.receiver import GroupMembership
from headway.weightsync.tensors.fingerprint import fingerprint

from .agent import play_outside
from .episodes import DIGITS, NONCE, Answer
from .learner import token_logprobs
from .process import BEGIN_ANEW, enter
from .protections import take_out
from .tasks import LONGEST, SCORER, STOP, VOCABULARY, WEIGHTS, logprobs_of, response_length, response_tokens, scores_of
from .trial import BROKER_TIMEOUT_S, KEY, LEASE_TTL_S, RUN, SILENT_S, Trial
from .user_code import PROMPT_TOKENS

TICK_S = 0.05
TOKENS_A_TICK = 2


_COUNTS = (
    *("generated", "resumed", "repeated", "forgotten", "received"),
    *("episodes_resumed", "turns_resumed", "tool_calls_resumed"),
)


class Tally(ctypes.Structure):
    """Counts in memory that outlives the process, so that kill -9 does not lose them."""

    _fields_ = tuple((name, ctypes.c_int64) for name in _COUNTS)
    generated: int
    """The number of generated tokens."""
    resumed: int
    """The number of tokens that another worker had generated."""
    repeated: int
    """The number of submissions made once more."""
    forgotten: int
    """The number of leases that a heartbeat did not renew."""
    received: int
    """Versions that came by broadcast."""
    episodes_resumed: int
    """The number of agents' episodes that went on after a lost worker or host process."""
    turns_resumed: int
    """The number of turns that these had behind them."""
    tool_calls_resumed: int
    """The number of tool calls in these turns, where no agent makes them again."""


class SlowEngine:
    """An engine in which every request is equally slow."""

    abilities = EngineAbilities(sleeps=False, tells_experts=False)
    tally: ClassVar[Tally] = Tally()
    """The counts of this process."""
    is_of_agents: ClassVar[bool] = False
    """Whether agents play this run's samples."""

    def __init__(self, config: EngineConfig, model_dir: Path, *, seed: int) -> None:
        self.capacity = config.max_concurrent
        self.max_model_len = config.max_model_len
        self._version: WeightVersion | None = None
        self._weights = torch.zeros(1)
        self._name = WEIGHTS

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """Generate from the end of the request's tokens."""
        if self.is_of_agents:
            async for chunk in self._answer(request):
                yield chunk
            return
        tid, position = _tid_of(request.request_id), len(request.prompt_tokens) - PROMPT_TOKENS
        length = response_length(tid)
        assert request.stop_token_ids == [STOP], request.stop_token_ids
        self.tally.resumed += position
        while position < length:
            await asyncio.sleep(TICK_S)
            assert self._version is not None, "a request before the first weights"
            end = min(position + TOKENS_A_TICK, length)
            tokens = response_tokens(tid, position, end, self._version, self._name)
            self.tally.generated += end - position
            position = end
            yield Chunk(
                token_ids=tokens.tolist(),
                logprobs=logprobs_of(tokens).tolist(),
                version=self._version,
                finish_reason="stop" if position == length else None,
            )

    async def _answer(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """Answer an agent's call; no request of it is ever interrupted and begun anew."""
        nonce = [random.randrange(DIGITS) for _ in range(NONCE)]
        answer = Answer(_tid_of(request.request_id), request.prompt_tokens, nonce)
        length, position = min(answer.length, request.max_new_tokens), 0
        while position < length:
            await asyncio.sleep(TICK_S)
            assert self._version is not None, "a request before the first weights"
            tokens = answer.tokens(position, min(position + TOKENS_A_TICK, length), self._version)
            self.tally.generated += len(tokens)
            position += len(tokens)
            ended: FinishReason | None = None if position < length else "stop" if length == answer.length else "length"
            logprobs = logprobs_of(np.array(tokens, np.int32)).tolist()
            yield Chunk(token_ids=tokens, logprobs=logprobs, version=self._version, finish_reason=ended)

    async def swap_weights(
        self, version: WeightVersion, tensors: NamedTensors, *, keep_cache: bool = False, check: Check | None = None
    ) -> None:
        """Use the weights from the next token on."""
        ((name, weights),) = tensors
        self._weights, self._name = weights.clone(), name
        if check is not None:
            check(WeightFingerprints.of({name: (fingerprint(self._weights), self._weights.numel())}))
        self._version = version

    async def swap_in_parts(
        self, version: WeightVersion, parts: Parts, *, keep_cache: bool = False, check: Check | None = None
    ) -> None:
        """Raise WeightSyncError, because no trial sends weights in parts."""
        raise WeightSyncError("the engine's double takes whole versions")

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return logprobs as the learner's double computes them."""
        logprobs: list[float] = token_logprobs(self._weights, torch.tensor(token_ids[1:])).tolist()
        return logprobs

    async def close(self) -> None:
        """There is nothing to free."""


def _tid_of(request_id: str) -> TrajectoryId:
    """Parse a worker's request id: `group:round:sample:...`, or `eval:place:...` for an evaluation."""
    group, round_, sample, *_ = request_id.split(":")
    if group == "eval":
        return TrajectoryId(group, 0, int(round_))
    return TrajectoryId(group, int(round_), int(sample))


REPEATED, FORGOTTEN, HELD_UP = 0.1, 0.04, 0.02
"""The shares of samples that are handed in once more later, not renewed, and handed in late."""
LONGEST_DELAY_S = 2 * LEASE_TTL_S


def run_worker(trial: Trial, url: str, name: str, process: str, tally: Tally, port: int = 0) -> None:
    """Run one `process` of the worker of this name, whose log it continues; with a `port` it is a gateway.

    It ends with code 0 when the run is finished, with BEGIN_ANEW where the product would begin anew.
    """
    enter(trial.directory, name)
    take_out(trial.without)
    torch.set_num_threads(1)
    SlowEngine.tally, SlowEngine.is_of_agents = tally, bool(trial.agents)
    patch.object(client, "Leases", ErraticLeases).start()
    patch.object(client, "StatusVerbs", ErraticStatus).start()
    patch.object(receiver, "GroupMembership", CountingGroup).start()
    if not trial.broadcasts:
        patch.object(headway.rollout_workers.worker, "Worker", PullingWorker).start()
    patch.object(rollout, "open_broker", partial(client.open_broker, timeout_s=BROKER_TIMEOUT_S)).start()
    own = _as_gateway(port) if port else ()
    if trial.agents:
        patch.object(headway.rollout_workers.agents.player, "EpisodeSession", CountingSession).start()
    try:
        rollout.work(url, RUN, process, own)
    except (ForeignRunError, ConfigChangedError) as error:
        print(error, flush=True)
        sys.exit(BEGIN_ANEW)


def _as_gateway(port: int) -> tuple[str, ...]:
    """Set this process up as `headway gateway` does, and return the keys of its own."""
    os.environ[external.KEY] = KEY
    patch.object(external, "SILENT_S", SILENT_S).start()
    return "agent.host='127.0.0.1'", f"agent.port={port}"


class CountingSession(EpisodeSession):
    """Counts what need not be sampled, or called, again."""

    def __init__(self, sample: PlayedSample, recorder: EpisodeRecorder, *what: Any, **named: Any) -> None:
        super().__init__(sample, recorder, *what, **named)
        self._count_resumed(is_run_again=False)

    def begin_again(self, attempt: str = "") -> None:
        super().begin_again(attempt)
        self._count_resumed(is_run_again=True)

    def _count_resumed(self, *, is_run_again: bool) -> None:
        """An agent from outside goes on with the answers of its tools, unless another one takes its episode over."""
        turns, tally, is_outside = self._recorder.turns, SlowEngine.tally, self._finish is not None
        if is_outside:
            calls = sum(turn.call.tool_calls for turn in turns if turn.call is not None)
            tally.tool_calls_resumed += -calls if is_run_again else calls
        if not (is_outside and is_run_again):
            tally.episodes_resumed += bool(turns)
            tally.turns_resumed += len(turns)
            tally.resumed += sum(turn.end - turn.start for turn in turns)


def run_agents(trial: Trial, ports: Sequence[int], process: str) -> None:
    """Run one `process` of agents from outside, for ever."""
    enter(trial.directory, "agents")
    asyncio.run(play_outside(str(trial.journal), trial.sandbox, ports, KEY))


class PullingWorker(Worker):
    """Takes part in no broadcast: forming a group anew at every death would take the trial's whole time."""

    def info(self) -> WorkerInfo:
        return msgspec.structs.replace(super().info(), wants_broadcast=False)


class CountingGroup(GroupMembership):
    """Counts the versions that it has received."""

    def receive(
        self, offer: WeightManifest, landing: BufferPool, cancelled: threading.Event
    ) -> tuple[WeightManifest, BufferSet]:
        received = super().receive(offer, landing, cancelled)
        SlowEngine.tally.received += 1
        return received


class ErraticStatus(StatusVerbs):
    """Forgets to renew some leases."""

    async def heartbeat(
        self, info: WorkerInfo, ttl_s: float, leases: Sequence[Lease] = (), lease_ttl_s: float = 0.0
    ) -> HeartbeatReply:
        """Renew all but the forgotten ones."""
        renewed = [one for one in leases if not _is_chosen(one, "forgotten", FORGOTTEN)]
        SlowEngine.tally.forgotten += len(leases) - len(renewed)
        return await super().heartbeat(info, ttl_s, renewed, lease_ttl_s)


class ErraticLeases(Leases):
    """Hands some samples in late, and some once more at unexpected times."""

    async def submit(self, lease: Lease, trajectory: Trajectory) -> SubmitOutcome:
        """Submit, perhaps late, and perhaps again later."""
        if _is_chosen(lease, "held up", HELD_UP):
            await asyncio.sleep(random.uniform(0, LONGEST_DELAY_S))
        outcome = await super().submit(lease, trajectory)
        if _is_chosen(lease, "repeated", REPEATED):
            _repetitions.add(repetition := asyncio.create_task(self._repeat(lease, trajectory)))
            repetition.add_done_callback(_repetitions.discard)
        return outcome

    async def _repeat(self, lease: Lease, trajectory: Trajectory) -> None:
        await asyncio.sleep(random.uniform(0, LONGEST_DELAY_S))
        SlowEngine.tally.repeated += 1
        with suppress(BrokerError):  # no caller waits for it
            await super().submit(lease, trajectory)


_repetitions = set[asyncio.Task[None]]()
"""References to the tasks, which the event loop does not keep."""


def _is_chosen(lease: Lease, for_what: str, share: float) -> bool:
    """Whether the lease is chosen: the same answer for one lease every time."""
    return random.Random(f"{for_what} {lease.token}").random() < share


def run_scorer(trial: Trial, url: str, name: str, process: str) -> None:
    """Run one `process` of the scorer of this name, whose log it continues.

    It ends with code 0 when the run is finished, with BEGIN_ANEW where the product would begin anew.
    """
    enter(trial.directory, name)
    patch.object(headway.rollout_workers.scorers.runtimes, "open_runner", TinyRunner).start()
    patch.object(scoring, "open_broker", partial(open_broker, timeout_s=BROKER_TIMEOUT_S)).start()
    try:
        scoring.score(url, RUN, process, SCORER, ())
    except (ForeignRunError, ConfigChangedError) as error:
        print(error, flush=True)
        sys.exit(BEGIN_ANEW)


TOKENS_PER_S = 1000
"""The speed at which a scorer has requests about half of the time."""


class TinyRunner:
    """The model's double."""

    vocabulary = VOCABULARY
    longest = PROMPT_TOKENS + LONGEST

    def __init__(self, kind: str, path: str, config: ScorersConfig, **named: object) -> None:
        """Take the arguments of `open_runner`, and load nothing."""

    def score(self, requests: Sequence[ScoreRequest]) -> list[Scores]:
        """Return one number for each request."""
        tokens = sum(len(request.prompt_tokens) + len(request.response_tokens) for request in requests)
        time.sleep(tokens / TOKENS_PER_S)
        return [scores_of(request.response_tokens) for request in requests]
