"""CPU time of a turn by its parts, at the first turn of an episode and at later ones.

All episodes go on turn by turn together, with an engine that answers once all have asked: what the worker's process
takes from one answer to the next is the cost of so many turns, of that number. Each turn goes the whole way: an agent
in a host process, HTTP, session, chat format, and a durable segment in a real server.
"""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from headway.broker.client import leases as leases_module
from headway.broker.schema import WeightVersion
from headway.rollout_workers.agents import digests, session, tree
from headway.rollout_workers.agents.endpoint import admission, server
from headway.rollout_workers.engines.base import Chunk, GenerationRequest
from headway.rollout_workers.samples.recorder import Recorder

from .engines import CALL
from .meter import Meter, process_s
from .parts import GROUP_SIZE, agent_config, fed, leases_of, opened_player, played_sample


class Together:
    """An engine that answers when all episodes have asked. It notes CPU times then."""

    def __init__(self, episodes: int, answer: list[int], meter: Meter, pids: dict[str, int]) -> None:
        self._episodes, self._answer, self._meter, self._pids = episodes, answer, meter, pids
        self._asked = 0
        self._all_have = asyncio.Event()
        self.context_tokens = 0
        self.marks: list[dict[str, float]] = []
        """CPU seconds at each turn, by part."""

    async def generate(self, request: GenerationRequest, recorder: Recorder) -> None:
        """Record one turn."""
        self._asked += 1
        self.context_tokens = len(request.prompt_tokens)
        if self._asked == self._episodes:
            self._asked = 0
            self._note()
            self._all_have.set()
            self._all_have = asyncio.Event()
        else:
            await self._all_have.wait()
        logprobs = [-0.5] * len(self._answer)
        version = WeightVersion(1, 0)
        recorder.add(Chunk(token_ids=self._answer, logprobs=logprobs, version=version, finish_reason="stop"))

    def _note(self) -> None:
        others = {f"process of {name}": process_s(pid) for name, pid in self._pids.items()}
        mark = {**self._meter.seconds, **others, "worker": time.process_time(), "wall": time.perf_counter()}
        self.marks.append({**mark, "context_tokens": self.context_tokens})


def metered() -> Meter:
    """Return a meter of all that a turn goes through in the worker's process."""
    meter = Meter()
    meter.measure_coroutine(server.Endpoint, "_respond", "endpoint")
    meter.measure_coroutine(admission.Calls, "_bounded", "session")
    meter.measure_coroutine(session.EpisodeSession, "_sampled", "session")
    meter.measure_coroutine(leases_module.Leases, "append", "append to the broker")
    meter.measure_coroutine(leases_module.Leases, "intend", "intent to the broker")
    for name in ("add_turn", "turn", "row", "longest_beginning", "segment"):
        meter.measure(tree.EpisodeRecorder, name, "recorder")
    meter.measure(digests.ConversationDigests, "links", "digests")
    return meter


async def _measure(model: Path, episodes: int, most_turns: int) -> tuple[list[dict[str, float]], dict[str, int]]:
    from transformers import AutoTokenizer

    answer = AutoTokenizer.from_pretrained(model)(CALL, add_special_tokens=False).input_ids
    meter = metered()
    player, decoding = await opened_player(model, agent_config({"turns": most_turns}))
    chat_format = player._format
    meter.measure(chat_format, "render", "chat format: rendering")
    meter.measure(chat_format, "bridge", "chat format: rendering")
    meter.measure(chat_format, "parse", "chat format: reading")
    async with fed(-(-episodes // GROUP_SIZE)) as (broker, version, server_pid):
        leases = await leases_of(broker, version, episodes)
        host = player._agents._pool._shared[0]._process._process.pid  # type: ignore[union-attr]
        engine = Together(episodes, answer, meter, {"agents": host, "the server": server_pid})

        async def play(lease: Any) -> None:
            most = (most_turns + 1) * 400
            recorder = player.recorder(lease.prompt)
            sample, log = played_sample(broker, lease, recorder, decoding, engine.generate, most)
            async with log:
                await player.play(sample)

        await asyncio.gather(*map(play, leases))
    await player.close()
    return engine.marks, {"answer_tokens": len(answer)}


class TurnsOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured."""

    model: str
    episodes: int = 32
    turns: tuple[int, ...] = (1, 8, 64)


def measure(told: object) -> dict[str, Any]:
    """Return milliseconds of CPU time of one turn, for each of these numbers of the turn."""
    order = msgspec.convert(told, TurnsOrder)
    model, episodes, turns = Path(order.model), order.episodes, order.turns
    marks, sizes = uvloop.run(_measure(model, episodes, max(turns) + 2))
    found: dict[str, Any] = {"episodes": episodes, **sizes, "cores": os.cpu_count()}
    for number in turns:
        window = 1 if number < 4 else 3  # turns of about this number
        first, last = marks[number - 1], marks[min(number - 1 + window, len(marks) - 1)]
        count = episodes * window
        parts = {
            name: round(1000 * (last[name] - first.get(name, 0.0)) / count, 4)
            for name in last
            if name not in ("context_tokens",)
        }
        known = sum(value for name, value in parts.items() if "process" not in name and name not in ("worker", "wall"))
        parts["event loop, HTTP and threads"] = round(parts["worker"] - known, 4)
        found[f"turn_{number}"] = {"context_tokens": first["context_tokens"], "cpu_ms": parts}
    return found
