"""Swaps and verifies an engine's weights. Only verified weights count as held.

`AdapterBaseWeights` are the frozen weights below a run's adapters: fetched once, and verified before an adapter comes
over them. What an engine holds and computes is compared with what was published: its tensors, and its logprobs of the
probe.
"""

import asyncio
import functools
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headway.broker.client.broker import Outages
from headway.broker.errors import NoRoomError, VersionRegressionError, WeightSyncError
from headway.broker.schema import WeightVersion
from headway.broker.schema.weights import Probe, TensorSpec, WeightManifest
from headway.rollout_workers.engines.base import (
    AdaptedEngine,
    Engine,
    WeightFingerprints,
    attaches_memory,
    rounding_of,
    takes_adapters,
)
from headway.rollout_workers.engines.weight_loading.named_tensors import is_fused
from headway.weightsync.deliveries import Delivery, StreamedDelivery
from headway.weightsync.subscriber import Subscriber

from .engine_turns import SwapTurns

log = logging.getLogger(__name__)


class AdapterBaseWeights:
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

    async def engine_with_base(self, incarnation: int) -> AdaptedEngine:
        """Return the engine once it holds the base of this learner's adapters. Another learner's may be the same, and
        is then not loaded again. Raises WeightSyncError if the engine cannot hold one."""
        if not takes_adapters(self._engine):
            raise WeightSyncError(
                "the run's versions are adapters, and this engine takes whole weights alone. Set weights.adapter=merged"
                " for the run, or start the worker with an engine that takes adapters (engine.kind=embedded)"
            )
        if self._fingerprints and self._incarnation == incarnation:
            return self._engine
        while (base := await self._outages.retry_until_available(self._fetched)) is not None:
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
        found: WeightFingerprints | None = None

        def check(held: WeightFingerprints | None) -> None:
            nonlocal found
            found = held
            refuse_other_tensors(base.manifest, held)

        nbytes = sum(spec.nbytes for spec in base.manifest.tensors)
        log.info("the base of adapters has come, %.1f GB; the engine loads it", nbytes / 1e9)
        self.forget()  # a load that fails may leave anything
        try:
            await engine.load_base(base.tensors, check=check if self._verify or not base.is_verified else None)
            if not base.is_verified and not covers_all_tensors(base.manifest, found):
                await self._subscriber.verify(base)
        except WeightSyncError as error:
            if base.is_verified or isinstance(error, NoRoomError):
                raise
            log.warning("the engine does not take the base of adapters as it lies in the model's files: %s", error)
            return False
        self._fingerprints = base.manifest.fingerprints
        log.info("holds the base of adapters: %d tensors", len(self._fingerprints))
        return True


RETRY_S = 0.5
"""Seconds between two attempts after a delivery that failed or was refused."""

PROBE_S = 300.0
"""Seconds for an engine to answer the probe while it samples. Without a limit an engine that hangs would hold no
version for ever."""

Contents = Literal["nothing", "version", "mixture", "away"]
"""The contents of an engine. "nothing": no weights, before the first version and after a sleep. "version": the newest
verified version. "mixture": parts of two versions, because the rest of one did not come; the engine is paused. "away":
it sleeps."""


class EngineWeights:
    """Keeps the engine's version as new as the subscriber delivers."""

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
        until_free: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        """`keep_cache`: see Engine.swap_weights. `until_free` waits until the version held may be
        replaced, and returns whether it had to wait; None: it always may."""
        self._engine = engine
        self._subscriber = subscriber
        self._outages = outages
        self._turns = turns
        self._keep_cache = keep_cache
        self._verify = verify
        self._on_swap = on_swap
        self._until_free = until_free
        self._changed = asyncio.Condition()
        self._engine_is_ours = asyncio.Lock()
        self._contents: Contents = "nothing"
        self._base = AdapterBaseWeights(engine, subscriber, outages, verify=verify)
        self.version: WeightVersion | None = None
        """The newest version that was verified, even if the engine has lost it since."""
        self.swaps = 0
        self.swap_s = 0.0
        """The time of all swaps, with their checks; of a version that arrives in parts, until it is there."""
        self._paused_s = 0.0
        self._paused_since: float | None = None
        self.last_error = ""

    @property
    def usable(self) -> WeightVersion | None:
        """The version that the engine holds and may sample with, if any."""
        return self.version if self._contents == "version" else None

    @property
    def may_sample(self) -> bool:
        """Whether the engine has weights and no swap holds it up. The calls of a swap have deadlines of their own."""
        return self._contents == "version" and not self._engine_is_ours.locked()

    @property
    def is_paused(self) -> bool:
        """Whether the engine holds parts of several versions. It samples nothing until it has a whole version."""
        return self._contents == "mixture"

    @property
    def paused_s(self) -> float:
        """The time for which the engine has held parts of several versions, so far."""
        return self._paused_s + (0.0 if self._paused_since is None else time.monotonic() - self._paused_since)

    async def follow(self) -> None:
        """Take every newer version, for ever. Raises WeightSyncError if the engine cannot hold one."""
        while True:
            delivery = await self._next_delivery()
            if self._until_free is not None and await self._until_free():
                delivery = self._subscriber.newer() or delivery
            has_waited = self._engine_is_ours.locked()
            async with self._engine_is_ours:
                if has_waited:
                    delivery = self._subscriber.newer() or delivery
                taken = await self._load_newest(delivery)
                if taken is None:
                    continue
                async with self._changed:
                    self.version, self._contents = taken.manifest.version, "version"
                    self._paused_s, self._paused_since = self.paused_s, None
                    self.swaps += 1
                    self.last_error = ""
                    self._changed.notify_all()
            self._on_swap()

    @asynccontextmanager
    async def engine_away(self) -> AsyncIterator[None]:
        """Swap no version in while the engine sleeps and loses its weights. Afterwards the newest version is swapped
        in, or the same one again if none has come."""
        async with self._engine_is_ours:
            self._contents = "away"
            self._base.forget()
            yield
            async with self._changed:
                self._contents = "nothing"
                self._changed.notify_all()

    async def reach(self, version: WeightVersion | None = None) -> WeightVersion:
        """Wait until the engine holds verified weights at least as new as `version` (None: any), and return their
        version."""
        await self._until(lambda: self.version is not None and (version is None or self.version >= version))
        assert self.version is not None
        return self.version

    async def _until(self, is_so: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(is_so)

    def _lacks_weights(self) -> bool:
        return self._contents in ("nothing", "mixture")

    async def _next_delivery(self) -> Delivery | StreamedDelivery:
        """Return the next delivery that may be loaded. Refused and failed deliveries are logged, and followed by a
        wait."""
        while True:
            try:
                delivery = await self._outages.retry_until_available(self._delivery)
                self._refuse_regression(delivery.manifest.version)
            except (WeightSyncError, VersionRegressionError) as error:
                self.last_error = str(error)
                log.error("weights not taken, trying again: %s", error)
                await asyncio.sleep(RETRY_S)
            else:
                return delivery

    async def _delivery(self) -> Delivery | StreamedDelivery:
        """Return the next newer version, or the newest version of all as soon as the engine has lost the one that it
        held."""
        if self._lacks_weights():
            return await self._subscriber.wait_for_version(None)
        newer = asyncio.ensure_future(self._subscriber.wait_for_version(self.version))
        lost = asyncio.ensure_future(self._until(self._lacks_weights))
        try:
            await asyncio.wait((newer, lost), return_when=asyncio.FIRST_COMPLETED)
        finally:
            lost.cancel()
            if not newer.done():  # cancelling it loses no version
                newer.cancel()
                await asyncio.wait((newer,))
        return await self._subscriber.wait_for_version(None) if newer.cancelled() else newer.result()

    def _turn(self, delivery: Delivery | StreamedDelivery) -> AbstractAsyncContextManager[bool]:
        """Return the turn to hold while `delivery` is swapped in. No turn is needed if the engine has no weights, as
        the swap then interrupts no sample, nor if the version arrives in parts, as the learner then lets few members of
        its group receive at once."""
        if self.usable is None or isinstance(delivery, StreamedDelivery):
            return nullcontext(False)
        return self._turns.turn(lambda: self._subscriber.is_arriving)

    def _refuse_regression(self, version: WeightVersion) -> None:
        is_again = self.usable is None and version == self.version
        if self.version is not None and version <= self.version and not is_again:
            raise VersionRegressionError(f"version {version} was delivered, but {self.version} is held; it was ignored")

    async def _load_newest(self, delivery: Delivery | StreamedDelivery) -> Delivery | StreamedDelivery | None:
        """Load `delivery`, or a newer version that came during the wait for a turn or for memory. Returns the loaded
        one, or None if it did not arrive as a whole."""
        while True:
            try:
                async with self._turn(delivery) as has_waited:
                    if has_waited:
                        delivery = self._subscriber.newer() or delivery
                    return delivery if await self._load(delivery) else None
            except NoRoomError as error:
                self.last_error = str(error)
                log.error("weights not swapped, trying again: %s", error)
                await asyncio.sleep(RETRY_S)
                delivery = self._subscriber.newer() or delivery

    async def _swap_in_parts(self, arriving: StreamedDelivery) -> bool:
        """Swap in a version as it arrives. If that fails halfway, the engine samples nothing until it has another
        version."""
        try:
            async with arriving.taken() as parts:
                await self._engine.swap_in_parts(
                    arriving.manifest.version,
                    parts,
                    keep_cache=self._keep_cache,
                    check=(lambda held: refuse_other_tensors(arriving.manifest, held)) if self._verify else None,
                )
        except WeightSyncError as error:
            self.last_error = str(error)
            # If no part has come, or the first one found no room, the engine goes on with what it has.
            if arriving.has_begun and not isinstance(error, NoRoomError):
                log.error(
                    "paused until a whole version is there, as version %s came in part: %s",
                    arriving.manifest.version,
                    error,
                )
                self._contents = "mixture"
                self._paused_since = self._paused_since or time.monotonic()
            else:
                log.warning("Version %s did not arrive: %s", arriving.manifest.version, error)
            return False
        return True

    async def _load(self, delivery: Delivery | StreamedDelivery) -> bool:
        """Swap and probe; a whole version that fails is swapped once more. Returns False if the version did not arrive.
        Raises NoRoomError if the engine is unchanged."""
        began_s = time.monotonic()
        try:
            is_there = await self._swap(delivery)
            self.swap_s += time.monotonic() - began_s
            if not is_there:
                return False
            if self._verify:
                await self._probe(delivery.manifest)
        except WeightSyncError as error:
            self.last_error = str(error)
            raise
        return True

    async def _swap(self, delivery: Delivery | StreamedDelivery) -> bool:
        if isinstance(delivery, StreamedDelivery):
            return await self._swap_in_parts(delivery)
        await self._swap_whole(delivery)
        return True

    async def _swap_whole(self, delivery: Delivery) -> None:
        """Swap in a whole version. While the engine is still paused, fingerprints prove that it holds the published
        tensors."""
        manifest = delivery.manifest
        how: dict[str, Any] = {
            "keep_cache": self._keep_cache,
            "check": functools.partial(refuse_other_tensors, manifest) if self._verify else None,
        }
        if manifest.adapter_scale:
            engine = await self._base.engine_with_base(manifest.version.incarnation)
            swap = functools.partial(
                engine.swap_adapter, manifest.version, delivery.tensors, manifest.adapter_scale, **how
            )
        else:
            swap = functools.partial(self._engine.swap_weights, manifest.version, delivery.tensors, **how)
        try:
            await swap()
        except NoRoomError:
            raise
        except WeightSyncError as error:
            self.last_error = str(error)
            log.error("swapping again: %s", error)
            try:
                await swap()
            except NoRoomError as again:  # the first attempt may have changed anything
                raise WeightSyncError(str(again)) from again

    async def _probe(self, manifest: WeightManifest) -> None:
        """Check that the engine computes as the learner does. The engine generates meanwhile, so wrong weights end the
        worker: if they were replaced under the same version, their samples would pass as that version's."""
        try:
            async with asyncio.timeout(PROBE_S):
                scores = await self._engine.score(manifest.probe.token_ids)
                base: Sequence[float] = ()
                if manifest.probe.base_logprobs and takes_adapters(self._engine):
                    base = await self._engine.score_base(manifest.probe.token_ids)
        except TimeoutError as error:
            raise WeightSyncError(
                f"the engine did not answer the probe of {manifest.version} within {PROBE_S:g} s; restart the worker"
            ) from error
        refuse_other_logprobs(manifest.probe, scores, manifest.version, rounding_of(self._engine))
        refuse_unused_adapter(manifest.probe, scores, base, manifest.version)


def refuse_other_tensors(manifest: WeightManifest, held: WeightFingerprints | None) -> None:
    """Raise WeightSyncError for the first tensor that the engine holds otherwise than it was published."""
    if held is None or not manifest.fingerprints:
        return
    places_P, sizes_P, is_checked_P = _where(manifest.tensors, held.names)
    elements_P = np.append(held.elements_N, 0)[places_P]
    copies_P, rest_P = np.divmod(elements_P, sizes_P)
    # Both sides wrap at 2^64, as their type does.
    expected_P = copies_P.astype(np.uint64) * np.array(manifest.fingerprints, np.uint64)
    differs_P = np.append(held.fingerprints_N, np.uint64(0))[places_P] != expected_P
    if (wrong_P := is_checked_P & (differs_P | (rest_P != 0) | (copies_P == 0))).any():
        first = int(wrong_P.argmax())
        name = manifest.tensors[first].name
        raise WeightSyncError(
            f"after the swap to version {manifest.version} the engine holds another {name} than was published "
            f"({elements_P[first]} elements of {sizes_P[first]}): tensors of several versions, or misplaced"
        )


def covers_all_tensors(manifest: WeightManifest, held: WeightFingerprints | None) -> bool:
    """Return whether `refuse_other_tensors` compares every tensor: the engine says what it holds, under the names that
    were published."""
    return held is not None and bool(_where(manifest.tensors, held.names)[2].all())


@functools.lru_cache(maxsize=2)
def _where(
    published: tuple[TensorSpec, ...], names: tuple[str, ...]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Return three arrays [P] over the published tensors: the place in `names` (past the end if it has none), the
    number of elements, and whether the engine must hold it under this name: experts that an engine took apart have
    other names. All versions have the same."""
    place = {name: number for number, name in enumerate(names)}
    places = [place.get(spec.name, len(names)) for spec in published]
    is_checked = [spec.name in place or not is_fused(spec.name) for spec in published]
    return np.array(places, np.int64), np.array([math.prod(spec.shape) for spec in published]), np.array(is_checked)


def refuse_other_logprobs(probe: Probe, scores: Sequence[float], version: WeightVersion, rounding: float = 0.0) -> None:
    """Raise WeightSyncError if the engine's logprobs of the probe differ from the learner's, on the mean of its tokens,
    by more than the probe's tolerance and the engine's own `rounding` allow.

    A single token says little: in bfloat16 an unlikely token of a real model is off by 0.6 where everything is right.
    """
    scored, expected = np.asarray(scores, np.float64), np.asarray(probe.logprobs, np.float64)
    if scored.shape != expected.shape:
        raise WeightSyncError(
            f"the probe of version {version} has {expected.size} logprobs, the engine gave {scored.size}"
        )
    difference = float(np.abs(scored - expected).mean()) if expected.size else 0.0  # a single token predicts none
    tolerance = max(probe.tolerance, rounding)
    # Negated, so that NaN fails too.
    if not difference <= tolerance:
        raise WeightSyncError(
            f"after the swap to version {version} the engine's logprobs differ from the learner's by a mean of "
            f"{difference:.3g} where rounding explains {tolerance:.3g}: it does not hold what "
            "was published. If it computes in a lower precision than the learner, workers.probe_swaps=false skips "
            "the check"
        )


def refuse_unused_adapter(
    probe: Probe, scores: Sequence[float], base_scores: Sequence[float], version: WeightVersion
) -> None:
    """Raise WeightSyncError if an adapter changes the learner's logprobs of the probe clearly, and the engine's by less
    than a quarter of that. `base_scores`: the engine's logprobs without the adapter. A probe that has none of the
    learner's without it is of whole weights, or of an older learner, and passes.

    The engine is compared with itself, so its rounding cancels out, as a quantized base does. What is clear: more than
    twice the difference of engine and learner without the adapter, which measures the rounding of both. That may be
    nothing where both compute by the same kernels, so it is at least a 25th of the probe's tolerance; and at most all
    of it, since a base that the engine quantizes differs by more than the learner rounds.
    """
    if not probe.base_logprobs:
        return
    base = np.asarray(base_scores, np.float64)
    if base.size != len(probe.base_logprobs):
        raise WeightSyncError(
            f"the probe of version {version} has {len(probe.base_logprobs)} logprobs without the adapter, the engine"
            f" gave {base.size}"
        )
    of_learner = _mean_size(np.subtract(probe.logprobs, probe.base_logprobs))
    of_engine = _mean_size(np.asarray(scores, np.float64) - base)
    of_rounding = _mean_size(base - probe.base_logprobs)
    clear = max(probe.tolerance / 25, min(2 * of_rounding, probe.tolerance))
    if of_learner > clear and not of_engine >= of_learner / 4:
        raise WeightSyncError(
            f"after the swap to version {version} the engine computes without its adapter: that changes the engine's"
            f" logprobs by a mean of {of_engine:.3g}, and the learner's by {of_learner:.3g}. The adapter is loaded and"
            " not used; set weights.adapter=merged, with which all versions are whole weights, or"
            " workers.probe_swaps=false, which skips the check"
        )


def _mean_size(differences: NDArray[np.float64]) -> float:
    return float(np.abs(differences).mean())
