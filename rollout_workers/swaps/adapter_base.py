"""The frozen weights below a run's adapters: fetched once, and proved before an adapter comes over them."""

import logging

from headway.broker.errors import NoRoomError, WeightSyncError
from headway.rollout_workers.engines.base import (
    AdaptedEngine,
    Engine,
    WeightFingerprints,
    attaches_memory,
    takes_adapters,
)
from headway.rollout_workers.outages import Outages
from headway.weightsync.deliveries import Delivery
from headway.weightsync.subscriber import Subscriber

from .tensors import refuse_other_tensors, tells_all

log = logging.getLogger(__name__)


class AdapterBase:
    """The base that an engine holds, if any."""

    def __init__(self, engine: Engine, subscriber: Subscriber, outages: Outages, *, verify: bool) -> None:
        self._engine = engine
        self._subscriber = subscriber
        self._outages = outages
        self._verify = verify
        self._fingerprints: tuple[int, ...] = ()
        """The fingerprints of the base that the engine holds; () without any."""
        self._incarnation = 0
        """The learner whose base that is."""
        self._looks_at_files = True
        """False once the engine has not taken a base from the model's files."""

    def forget(self) -> None:
        """Note that the engine has lost it."""
        self._fingerprints = ()

    async def held(self, incarnation: int) -> AdaptedEngine:
        """Return the engine once it holds the base of this learner's adapters. Another learner's may be the same, and
        is then not loaded again. Raises WeightSyncError if the engine cannot hold one."""
        if not takes_adapters(self._engine):
            raise WeightSyncError(
                "the run's versions are adapters, and this engine takes whole weights alone. Set weights.adapter=merged"
                " for the run, or start the worker with an engine that takes adapters (engine.kind=embedded)"
            )
        if self._fingerprints and self._incarnation == incarnation:
            return self._engine
        while (base := await self._outages.ride_out(self._fetched)) is not None:
            if await self._is_loaded(self._engine, base):
                break
            self._looks_at_files = False
        self._incarnation = incarnation
        return self._engine

    async def _fetched(self) -> Delivery | None:
        return await self._subscriber.base(
            self._fingerprints, attachable=attaches_memory(self._engine), from_files=self._looks_at_files
        )

    async def _is_loaded(self, engine: AdaptedEngine, base: Delivery) -> bool:
        """Load a base. Returns False if it lay in the model's files and is not what was published."""
        told: WeightFingerprints | None = None

        def check(held: WeightFingerprints | None) -> None:
            nonlocal told
            told = held
            refuse_other_tensors(base.manifest, held)

        nbytes = sum(spec.nbytes for spec in base.manifest.tensors)
        log.info("the base of adapters has come, %.1f GB; the engine loads it", nbytes / 1e9)
        self.forget()  # a load that fails may leave anything
        try:
            await engine.load_base(base.tensors, check=check if self._verify or not base.is_verified else None)
            if not base.is_verified and not tells_all(base.manifest, told):
                await self._subscriber.verify(base)
        except WeightSyncError as error:
            if base.is_verified or isinstance(error, NoRoomError):
                raise
            log.warning("the engine does not take the base of adapters as it lies in the model's files: %s", error)
            return False
        self._fingerprints = base.manifest.fingerprints
        log.info("holds the base of adapters: %d tensors", len(self._fingerprints))
        return True
