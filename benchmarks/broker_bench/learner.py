"""The learner's loop without training: feed -> take -> announce -> commit, each step as soon as its batch is ready."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from headway.broker import Broker
from headway.broker.client.learner import CheckpointMark, Owner, TakenBatch
from headway.broker.schema import RunRules, WeightVersion
from headway.broker.schema.weights import Probe, WeightManifest

from .payloads import GROUP_SIZE, PROMPT_TOKENS, prompt

BATCH = 64
"""The trajectories of one step."""
MAX_LAG = 16
POLL_S = 0.01
_FED_AT_ONCE = 256
_MAX_BYTES = 8 << 30


@dataclass(frozen=True)
class Run:
    """The size of a run: so many groups, a batch's worth in every step."""

    groups: int
    group_size: int = GROUP_SIZE
    prompt_tokens: int = PROMPT_TOKENS
    max_lag: int = MAX_LAG
    feed_ahead_steps: int = 1 << 40
    """Steps fed beyond those that may be admitted; where that suffices, all groups are fed before the first step."""

    @property
    def groups_per_step(self) -> int:
        return BATCH // self.group_size

    @property
    def rules(self) -> RunRules:
        return RunRules(max_lag=self.max_lag, groups_per_step=self.groups_per_step, max_bytes=_MAX_BYTES)


class Learner:
    """One learner that has claimed its run and announced the first weights."""

    def __init__(self, broker: Broker, owner: Owner, run: Run) -> None:
        self._broker = broker
        self._owner = owner
        self._run = run
        self._fed = 0
        self._watermark = Watermark()
        self.take_s: list[float] = []
        """The seconds of every take that gave a batch, decoding included."""

    @classmethod
    async def begin(cls, broker: Broker, run: Run) -> "Learner":
        claim = await broker.batches.claim(checkpoint=CheckpointMark(0, 0), rules=run.rules, config=b"", resume=False)
        learner = cls(broker, claim.owner, run)
        await learner._announce(0)
        await learner._feed(0)
        return learner

    async def steps(self, steps: range | None = None) -> AsyncIterator[TakenBatch]:
        """Yield the batches of these steps, or of all; the request for the next one announces and commits each."""
        for step in steps or range(self._run.groups // self._run.groups_per_step):
            batch = await self.take(step)
            yield batch
            await self._announce(step + 1)
            groups = [group.prompt.group for group in batch.groups]
            await self._broker.batches.commit(self._owner, step + 1, groups, self._watermark.trained(groups))
            await self._feed(step + 1)

    async def train(self, steps: range | None = None) -> None:
        """Take all steps, whatever they hold."""
        async for _ in self.steps(steps):
            pass

    async def take(self, step: int) -> TakenBatch:
        """Wait for the batch, and return it."""
        while True:
            asked = time.perf_counter()
            batch = await self._broker.batches.take(self._owner, step, self._run.groups_per_step)
            if isinstance(batch, TakenBatch):
                self.take_s.append(time.perf_counter() - asked)
                return batch
            await asyncio.sleep(POLL_S)

    async def _announce(self, step: int) -> None:
        await self._broker.versions.announce(self._owner, _manifest(self._owner, step))

    async def _feed(self, step: int) -> None:
        run = self._run
        wanted = min(run.groups, (step + run.max_lag + 1 + run.feed_ahead_steps) * run.groups_per_step)
        while self._fed < wanted:
            positions = range(self._fed, min(wanted, self._fed + _FED_AT_ONCE))
            prompts = [prompt(position, run.group_size, run.prompt_tokens) for position in positions]
            await self._broker.prompts.feed(prompts, self._owner)
            self._fed = positions.stop


class Watermark:
    """The first group that has not been trained, while groups finish in any order."""

    def __init__(self) -> None:
        self._next = 0
        self._ahead = set[int]()

    def trained(self, groups: Sequence[str]) -> str:
        """Return the group id below which everything has been trained."""
        self._ahead.update(int(group.partition("-")[2]) for group in groups)
        while self._next in self._ahead:
            self._ahead.remove(self._next)
            self._next += 1
        return f"0000-{self._next:08d}"


def _manifest(owner: Owner, step: int) -> WeightManifest:
    return WeightManifest(
        version=WeightVersion(owner.incarnation, step),
        tensors=(),
        buckets=(),
        probe=Probe(token_ids=[1, 2], logprobs=[-1.0], tolerance=1e-4),
        group_epoch=0,
        pull_url="http://127.0.0.1:1",
        pull_token="none",
        fingerprints=(),
    )
