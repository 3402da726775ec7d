"""Where an engine's weights are swapped and verified. Only verified weights count as held."""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

import numpy as np

from broker.errors import NoRoomError, VersionRegressionError, WeightSyncError
from broker.schema import Probe, WeightManifest, WeightVersion
from weightsync.fingerprint import MODULUS
from weightsync.subscriber import Delivery, Subscriber

from .engines.base import Engine, HeldTensor
from .engines.loading import is_fused
from .outages import Outages
from .turns import SwapTurns

RETRY_S = 0.5
"""Between attempts after a delivery that failed or was refused."""

log = logging.getLogger(__name__)


class HeldWeights:
    """The version that the engine holds, kept as new as the subscriber delivers."""

    def __init__(
        self,
        engine: Engine,
        subscriber: Subscriber,
        outages: Outages,
        turns: SwapTurns,
        *,
        keep_cache: bool,
        verify: bool,
        on_swap: Callable[[], None],
    ) -> None:
        """`keep_cache`: see Engine.swap_weights."""
        self._engine = engine
        self._subscriber = subscriber
        self._outages = outages
        self._turns = turns
        self._keep_cache = keep_cache
        self._verify = verify
        self._on_swap = on_swap
        self._changed = asyncio.Condition()
        self.version: WeightVersion | None = None
        self.swaps = 0
        self.last_error = ""

    async def follow(self) -> None:
        """Take every newer version, forever. Raises WeightSyncError if the engine cannot hold one."""
        while True:
            delivery = await self._load_newest(await self._next_delivery())
            async with self._changed:
                self.version = delivery.manifest.version
                self.swaps += 1
                self.last_error = ""
                self._changed.notify_all()
            self._on_swap()

    async def reach(self, version: WeightVersion | None = None) -> WeightVersion:
        """Wait until weights at least as new as `version` (None: any at all) are held and verified."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self.version is not None and (version is None or self.version >= version)
            )
        assert self.version is not None
        return self.version

    async def _next_delivery(self) -> Delivery:
        """The next delivery that may be loaded; refused and failed ones are logged and waited out."""
        while True:
            try:
                delivery = await self._outages.ride_out(lambda: self._subscriber.wait_for_version(self.version))
                self._refuse_regression(delivery.manifest.version)
            except (WeightSyncError, VersionRegressionError) as error:
                self.last_error = str(error)
                log.error("weights not taken, trying again: %s", error)
                await asyncio.sleep(RETRY_S)
            else:
                return delivery

    def _turn(self) -> AbstractAsyncContextManager[bool]:
        """An engine without weights generates nothing that a swap would hold up."""
        return nullcontext(False) if self.version is None else self._turns.turn()

    def _refuse_regression(self, version: WeightVersion) -> None:
        if self.version is not None and version <= self.version:
            raise VersionRegressionError(f"{version} was delivered, but {self.version} is held; it was ignored")

    async def _load_newest(self, delivery: Delivery) -> Delivery:
        """Load `delivery`, or the newest that came while this waited for a turn or for memory; the one it was."""
        while True:
            try:
                async with self._turn() as has_waited:
                    if has_waited:
                        delivery = self._subscriber.newer() or delivery
                    await self._load(delivery)
            except NoRoomError as error:
                self.last_error = str(error)
                log.error("weights not swapped, trying again: %s", error)
                await asyncio.sleep(RETRY_S)
                delivery = self._subscriber.newer() or delivery
            else:
                return delivery

    async def _load(self, delivery: Delivery) -> None:
        """Swap, once more if that fails, and verify. Raises NoRoomError if nothing was touched.

        Wrong weights are not swapped for others of the same version: what they sampled meanwhile would pass as its.
        """
        try:
            await self._swap(delivery)
            await self._refuse_wrong_weights(delivery.manifest)
        except WeightSyncError as error:
            self.last_error = str(error)
            raise

    async def _swap(self, delivery: Delivery) -> None:
        version = delivery.manifest.version
        try:
            await self._engine.swap_weights(version, delivery.tensors, keep_cache=self._keep_cache)
        except NoRoomError:
            raise
        except WeightSyncError as error:
            self.last_error = str(error)
            log.error("swapping again: %s", error)
            try:
                await self._engine.swap_weights(version, delivery.tensors, keep_cache=self._keep_cache)
            except NoRoomError as again:  # the first attempt may have left anything
                raise WeightSyncError(str(again)) from again

    async def _refuse_wrong_weights(self, manifest: WeightManifest) -> None:
        """Its tensors' fingerprints prove the version; the probe, that it computes with them as the learner does."""
        if self._verify:
            refuse_other_tensors(manifest, await self._engine.held())
            scores = await self._engine.score(manifest.probe.token_ids)
            refuse_other_logprobs(manifest.probe, scores, manifest.version)


def refuse_other_logprobs(probe: Probe, scores: Sequence[float], version: WeightVersion) -> None:
    """Raises WeightSyncError where the engine's logprobs of the probe are not the learner's, on the mean of its tokens.

    A single token says little: in bfloat16 an unlikely one of a real model is off by 0.6 where everything is right.
    """
    scored, expected = np.asarray(scores, np.float64), np.asarray(probe.logprobs, np.float64)
    if scored.shape != expected.shape:
        raise WeightSyncError(f"the probe of {version} has {expected.size} logprobs, the engine gave {scored.size}")
    difference = float(np.abs(scored - expected).mean())
    # Written so that NaN fails too.
    if not difference <= probe.tolerance:
        raise WeightSyncError(
            f"after the swap to {version} the engine's logprobs differ from the learner's by a mean of "
            f"{difference:.3g} where rounding explains {probe.tolerance:.3g}: it does not hold what "
            "was published. If it computes in a lower precision than the learner, raise the tolerance; "
            "workers.probe_swaps=false skips the check"
        )


def refuse_other_tensors(manifest: WeightManifest, held: Mapping[str, HeldTensor] | None) -> None:
    """Raises WeightSyncError for the first tensor of which the engine holds something else than was published."""
    if held is None or not manifest.fingerprints:
        return
    for spec, published in zip(manifest.tensors, manifest.fingerprints, strict=True):
        if is_fused(spec.name) and spec.name not in held:  # the engine took it apart
            continue
        one = held.get(spec.name, HeldTensor(0, 0))
        copies, rest = divmod(one.elements, math.prod(spec.shape))
        if rest or not copies or one.fingerprint != copies * published % MODULUS:
            raise WeightSyncError(
                f"after the swap to {manifest.version} the engine holds another {spec.name} than was published "
                f"({one.elements} elements of {math.prod(spec.shape)}): tensors of several versions, or misplaced"
            )
