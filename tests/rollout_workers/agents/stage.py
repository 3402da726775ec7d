"""A worker's player with a real endpoint and real host processes, whose engine follows a script."""

import asyncio
import os
import tempfile
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from headway.broker.schema import Prompt
from headway.broker.user_code.import_paths import ImportRoots
from headway.rollout_workers.agents.endpoint.connections import EndpointSettings
from headway.rollout_workers.agents.endpoint.server import Endpoint
from headway.rollout_workers.agents.hosted import AgentHosts
from headway.rollout_workers.agents.player import AgentPlayer, OpenSessions
from headway.rollout_workers.config import AgentConfig
from headway.rollout_workers.decoding import Decoding
from headway.rollout_workers.engines.base import GenerationRequest
from headway.rollout_workers.rewards.built_in import ZeroReward
from headway.rollout_workers.samples.episode import PlayedSample, ScoredTurn

from .sessions import CharacterFormat, Engine

MINUTES = 600.0
MARK = "HEADWAY_TEST_STAGE"
"""A variable that all processes have that a stage has started, whatever became of their parents."""


class Stage:
    """Plays episodes."""

    def __init__(self, player: AgentPlayer, endpoint: Endpoint) -> None:
        self.player, self.endpoint = player, endpoint
        self.engine = Engine()
        self._number = 0

    async def play(self, text: str) -> ScoredTurn:
        """Play an episode of a prompt with this text. Raises what a worker would see."""
        self._number += 1
        group = f"0-{self._number}"
        prompt = Prompt(group=group, token_ids=[900], text=text, ground_truth=None, data_source="test", num_samples=1)
        request = GenerationRequest(
            request_id=f"{group}:0", prompt_tokens=[900], max_new_tokens=5000, temperature=1.0, stop_token_ids=[]
        )
        sample = PlayedSample(
            prompt=prompt,
            number=0,
            recorder=self.player.recorder(prompt),
            request=request,
            generate=self.engine.generate,
            max_model_len=20_000,
        )
        try:
            scored = await self.player.play(sample)
        finally:
            self.engine.asked.clear()
        assert scored is not None
        return scored


@asynccontextmanager
async def staged(
    kind: str, directory: Path | None = None, settings: EndpointSettings | None = None, **config: Any
) -> AsyncIterator[Stage]:
    """Open a stage for an agent, and close it."""
    made = AgentConfig(kind=kind, **config)
    sessions = OpenSessions()
    endpoint = await Endpoint.start(sessions, settings=settings)
    hosts = await AgentHosts.open(made, ImportRoots(("tests", "python"), directory or Path.cwd()))
    decoding = Decoding(lambda ids: "".join(map(chr, ids)), ())
    player = AgentPlayer(made, hosts, endpoint, sessions, ZeroReward(), CharacterFormat(), decoding, model="m")
    try:
        yield Stage(player, endpoint)
    finally:
        await player.close()


async def until(holds: Callable[[], object]) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(MINUTES):
        while not holds():  # noqa: ASYNC110 - nobody notifies
            await asyncio.sleep(0.01)


class Held(NamedTuple):
    """What a process holds that could be left behind."""

    descriptors: int
    tasks: int
    threads: int
    """Without those of the event loop, which it keeps for later."""
    processes: int
    """Below this one, and those that have its mark."""
    files: int
    """In the directory for temporary ones."""


def held() -> Held:
    """Return what this process holds now."""
    return Held(
        len(os.listdir("/proc/self/fd")),
        len(asyncio.all_tasks()),
        sum(not one.name.startswith("asyncio_") for one in threading.enumerate()),
        len(living()),
        len(os.listdir(tempfile.gettempdir())),
    )


def remains() -> str:
    """Describe what this process holds."""
    processes = [" ".join(psutil.Process(pid).cmdline()) for pid in living()]
    return f"{processes} {threading.enumerate()} {asyncio.all_tasks()} {os.listdir(tempfile.gettempdir())}"


def living() -> set[int]:
    """Return the living processes below this one, and those that have the mark in their environment."""
    found = {one.pid for one in psutil.Process().children(recursive=True)}
    mark = f"{MARK}={os.environ.get(MARK, '')}".encode()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                found.add(int(name))
        except OSError:
            continue
    return {pid for pid in found - {os.getpid()} if _runs(pid)}


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
