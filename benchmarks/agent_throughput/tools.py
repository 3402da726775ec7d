"""Tokens a second of an engine whose agents wait for tools, beside agents whose tools answer at once, and beside plain
sampling: a real worker with a real server, which keeps the same engine full in all three."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
import uvloop

from benchmarks import command
from headway.broker import Broker
from headway.broker.schema import WeightVersion
from headway.rollout_workers.agents.formats import open_format
from headway.rollout_workers.agents.player import AgentPlayer
from headway.rollout_workers.config import SamplingConfig, WorkersConfig
from headway.rollout_workers.decoding import load_decoding
from headway.rollout_workers.environments import SingleTurn
from headway.rollout_workers.samples.episode import Episodes
from headway.rollout_workers.samples.leased_samples import WorkerContext
from headway.rollout_workers.worker import Worker
from headway.weightsync.config import WeightsConfig

from .agents import RULES, TOOLS
from .engines import CountedEngine, EngineOrder, OneVersion, manifest_of, opened
from .meter import process_s
from .parts import TTL_S, OneReward, agent_config, end_tokens, fed, opened_player

Kind = Literal["plain", "tools at once", "tools that take their time"]
WARM_S: dict[Kind, float] = {"plain": 2.0, "tools at once": 10.0, "tools that take their time": 3600.0}
"""Seconds after which a worker is in full swing; with tools that take their time those of the order."""
OBSERVED_TOKENS = 200
"""No tool's answer has more."""


class ToolsOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured."""

    engine: EngineOrder
    turns: int = 8
    answer_tokens: int = 64
    """The longest answer of a turn."""
    tool_median_s: float = 2.0
    tool_spread: float = 1.2
    tool_most_s: float = 30.0
    clock: float = 1.0
    """Real seconds for each second of a tool."""
    episodes_per_place: int = 24
    processes: int = 1
    warm_s: float = 40.0
    """The seconds before anything is counted: until as many episodes are open as it takes."""
    seconds: float = 40.0
    groups: int = 4096
    kinds: tuple[Kind, ...] = ("plain", "tools at once", "tools that take their time")


class Bench:
    """One engine, and workers that have it sample one after another."""

    def __init__(self, order: ToolsOrder, broker: Broker, version: WeightVersion, engine: CountedEngine) -> None:
        self._order, self._broker, self._version, self._engine = order, broker, version, engine
        self._model = Path(order.engine.model)

    async def measured(self, kind: Kind) -> dict[str, Any]:
        """Return what a worker reaches."""
        async with self._running(kind) as (worker, host):
            command.tell(f"{kind}: warms up")
            await asyncio.sleep(min(self._order.warm_s, WARM_S[kind]))
            before = self._mark(host)
            await asyncio.sleep(self._order.seconds)
            after = self._mark(host)
            episodes = worker.info().active
        seconds = after["wall"] - before["wall"]
        each = {name: (after[name] - before[name]) / seconds for name in after}
        found = {
            "tokens_per_s": round(each["tokens"], 1),
            "requests_per_s": round(each["requests"], 2),
            "running_mean": round(each["running"], 2),
            "asked_mean": round(each["asked"], 2),
            "open_episodes": episodes,
            "worker_share_of_a_core": round(each["worker"], 3),
            "agents_share_of_a_core": round(each["host"], 3),
        }
        command.tell(f"{kind}: {found}")
        return found

    def _mark(self, host: int) -> dict[str, float]:
        cpu = {"worker": time.process_time(), "host": process_s(host) if host else 0.0}
        return {**self._engine.figures(), **cpu, "wall": time.monotonic()}

    @asynccontextmanager
    async def _running(self, kind: Kind) -> AsyncIterator[tuple[Worker, int]]:
        player, host = await self._player(kind)
        order = self._order
        most = order.turns * (order.answer_tokens + OBSERVED_TOKENS)
        context = WorkerContext(
            worker=f"worker-{kind.replace(' ', '-')}",
            engine_kind=order.engine.kind,
            lease_ttl_s=TTL_S,
            decoding=load_decoding(self._model, end_tokens(self._model)),
            sampling=SamplingConfig(max_new_tokens=order.answer_tokens if kind == "plain" else most),
            config=WorkersConfig(probe_swaps=False),
            weights=WeightsConfig(),
        )
        subscriber: Any = OneVersion(manifest_of(self._version))
        engine: Any = self._engine
        worker = Worker(context, broker=self._broker, engine=engine, subscriber=subscriber, player=player)
        task = asyncio.create_task(worker.run())
        try:
            yield worker, host
            if task.done():
                task.result()
        finally:
            worker.request_drain()
            await asyncio.wait([task])

    async def _player(self, kind: Kind) -> tuple[Any, int]:
        """Return what plays samples, and the process of the agents."""
        order = self._order
        if kind == "plain":
            return Episodes(SingleTurn(), OneReward(), load_decoding(self._model, end_tokens(self._model))), 0
        waits = kind == "tools that take their time"
        options = {
            "turns": order.turns,
            "tool_median_s": order.tool_median_s if waits else 0.0,
            "tool_spread": order.tool_spread,
            "tool_most_s": order.tool_most_s,
            "clock": order.clock,
        }
        config = agent_config(
            options,
            max_turn_tokens=order.answer_tokens,
            episodes_per_place=order.episodes_per_place,
            processes=order.processes,
            turn_s=3600.0,
            on_failure="zero",
        )
        player, _ = await opened_player(self._model, config)
        return player, host_of(player)


def host_of(player: AgentPlayer) -> int:
    """Return the first process of a player's agents."""
    pool: Any = player._agents
    return int(pool._pool._shared[0]._process._process.pid)


async def _measure(order: ToolsOrder) -> dict[str, Any]:
    model = Path(order.engine.model)
    conversation = [{"role": "system", "content": RULES * 6}, {"role": "user", "content": "The state of an order?"}]
    prompt = open_format(model, end_tokens(model), "chatml").render(conversation, TOOLS)
    async with fed(order.groups, prompt) as (broker, version, _):
        began = time.monotonic()
        whole = await opened(order.engine, version)
        found: dict[str, Any] = {"engine_opened_s": round(time.monotonic() - began, 1), "prompt_tokens": len(prompt)}
        bench = Bench(order, broker, version, CountedEngine(whole))
        for kind in order.kinds:
            try:
                found[kind] = await bench.measured(kind)
            except Exception as error:  # noqa: BLE001 - the figures of others are to be told
                found[kind] = {"error": f"{type(error).__name__}: {error}"[:500]}
        await whole.close()
    rates = {kind: found[kind].get("tokens_per_s", 0.0) for kind in order.kinds}
    slow, fast = rates.get("tools that take their time", 0.0), rates.get("tools at once", 0.0)
    return {**found, "ratio": round(slow / fast, 3) if fast else None, "cores": os.cpu_count()}


def measure(told: object) -> dict[str, Any]:
    """Return what the engine reaches in each way."""
    order = msgspec.convert(told, ToolsOrder)
    found: dict[str, Any] = uvloop.run(_measure(order))
    return {"order": msgspec.to_builtins(order), **found}
