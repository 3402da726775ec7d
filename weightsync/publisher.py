"""The learner's end: offers a version, gathers and broadcasts it, announces it, and serves it to workers that pull.

The caller's thread gathers; another thread does all the rest. A broadcast that fails costs its deadline and nothing
else. Only errors that the learner must know are raised: FencedError, VersionRegressionError, BrokerUnavailableError.
"""

import concurrent.futures
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import msgspec
import torch

from headway.broker import BlockingBroker
from headway.broker.errors import VersionRegressionError
from headway.broker.schema import Owner, WeightVersion
from headway.broker.schema.status import WorkerInfo
from headway.broker.schema.weights import Archived, BaseWeights, BroadcastGroup, Probe, TensorSpec, WeightManifest
from headway.broker.user_code.import_paths import ImportRoots
from headway.weightsync.archives import open_archive
from headway.weightsync.archives.archiver import Archiver
from headway.weightsync.config import WeightsConfig
from headway.weightsync.limits import Deadline
from headway.weightsync.sender import Sender, follows_by_pull
from headway.weightsync.tensors.buckets import sha256_of
from headway.weightsync.tensors.deltas import Delta, DeltaChain
from headway.weightsync.tensors.staging import BASE, Gathering, StagedWeights, Staging, describe_base, stage
from headway.weightsync.transports.addresses import learner_address
from headway.weightsync.transports.broadcast import seal
from headway.weightsync.transports.rendezvous import BlockingStore
from headway.weightsync.transports.threads import DaemonPool

from .transports.base import abilities_of, broadcast_device
from .transports.http_pull import PullServer

logger = logging.getLogger(__name__)
_DIGESTS_AT_ONCE = 8


@dataclass(frozen=True)
class PublishReport:
    """The cost of one publication, and the workers that it reached."""

    version: WeightVersion
    seconds: float
    nbytes: int
    members: tuple[str, ...]
    """Workers that verified every byte before the announcement; all others pull."""
    failed: str
    """Why the broadcast did not reach some member, or ""."""


class Publication:
    """A version that a publisher makes the run's newest, while its caller goes on."""

    def __init__(self, begin: Callable[[], Future[PublishReport]]) -> None:
        self._begin = begin
        self._attempt: Future[PublishReport] | None = begin()

    @property
    def is_over(self) -> bool:
        """Whether `report` returns or raises at once."""
        return self._attempt is None or self._attempt.done()

    def report(self) -> PublishReport:
        """Wait until the version is announced. Raises VersionRegressionError, FencedError or BrokerUnavailableError
        where it was not, and workers go on with the previous version; after BrokerUnavailableError, calling again
        retries."""
        attempt, self._attempt = self._attempt or self._begin(), None
        report = attempt.result()
        self._attempt = attempt
        return report


class Publisher:
    """Publishes the versions of one owner of the run, one at a time, called from one thread."""

    def __init__(
        self, broker: BlockingBroker, owner: Owner, config: WeightsConfig, roots: ImportRoots | None = None
    ) -> None:
        """`roots`: modules below which a transport of the user's own may be imported; by default those of
        ImportRoots."""
        roots = roots or ImportRoots()
        abilities = abilities_of(config.transport, roots)
        self._blocking = broker
        self._versions = broker.broker.versions
        self._owner = owner
        self._config = config
        device = torch.device(broadcast_device(config, abilities))
        self._memory_is_reused = device.type == "cuda"
        """A GPU has room for one version: the next version overwrites it, and workers that are still pulling it get the
        rest from a copy in host memory, if there is one."""
        self._staging = Staging(config.bucket_bytes, device, memory_is_reused=self._memory_is_reused)
        self._token = secrets.token_urlsafe(24)
        self._offered: WeightVersion | None = None
        self._announced: WeightManifest | None = None
        """The last version that this publisher announced. Workers know it, so an offer of the same tensors names this
        version instead of repeating them."""
        self._base: BaseWeights | None = None
        self._adapter_scale = 0.0
        archive = open_archive(config.archive, broker, owner)
        address = learner_address(config.host, broker.broker.url)
        self._sender = Sender(
            BlockingStore(broker.call, broker.broker.rendezvous),
            owner.incarnation,
            self._last_epoch(),
            address,
            config,
            self._put_group,
            roots,
        )
        self._pull_server = PullServer(
            address,
            self._token,
            config.broadcast_timeout_s,
            ports=config.ports,
            tls=config.tls if config.trust == "members" else True,
            memory_is_reused=self._memory_is_reused,
        )
        self._chain = DeltaChain(config.delta_chain)
        self._archiver = None if archive is None else Archiver(archive, config.delta_chain, config.broadcast_timeout_s)
        self._thread = DaemonPool("publish", 1)
        self._under_way: Future[PublishReport] | None = None
        # On a stream of its own a transfer does not wait for the training that runs on the GPU meanwhile.
        uses_gpu = self._memory_is_reused or not abilities.sends_host_memory
        self._stream = torch.cuda.Stream() if uses_gpu else None  # type: ignore[no-untyped-call]

    def serve_base(self, tensors: Iterable[tuple[str, torch.Tensor]], adapter_scale: float) -> None:
        """Keep the frozen weights in host memory, for workers to pull once: every version from now on is an adapter,
        which adds `adapter_scale` * B A to them. Raises NoRoomError, and WeightSyncError for tensors that cannot be
        sent."""
        started = time.monotonic()
        staged = stage(tensors, self._config.bucket_bytes)
        self._pull_server.serve_always(BASE, staged.buckets)
        logger.info(
            "serves the base of adapters: %.1f GB, copied in %.1f s", staged.nbytes / 1e9, time.monotonic() - started
        )
        self._base, self._adapter_scale = describe_base(staged, self._digests(staged)), adapter_scale

    def gather(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Gathering:
        """Prepare memory for the next version, which is to have these tensors. None of them is read before `begin`,
        which the caller calls once the previous version is announced. Raises NoRoomError."""
        return self._staging.begin(tensors)

    def begin(self, version: WeightVersion, gathering: Gathering, probe: Probe) -> Publication:
        """Make `version` the run's newest. Returns once all tensors are taken, since gathering them may be collective;
        they may change from then on. `Publication.report` waits for the rest.

        The rest takes at most three broadcast deadlines, a fourth for deltas and a fifth to archive them; with
        `staging: none` one more for every further wave of members. Raises WeightSyncError for tensors that cannot be
        sent.
        """
        if self._memory_is_reused and self._announced is not None:
            self._pull_server.release(self._announced.version)
        publication = Publication(lambda: self._submit(version, gathering, probe))
        gathering.take()
        return publication

    def publish(self, version: WeightVersion, gathering: Gathering, probe: Probe) -> PublishReport:
        """Call `begin` and return its report, with the errors of both. After BrokerUnavailableError it may be called
        again with the same arguments."""
        return self.begin(version, gathering, probe).report()

    def close(self) -> None:
        """Leave the group and stop serving. Workers keep the versions that they hold. Idempotent."""
        self._thread.close()
        if self._under_way is not None:
            concurrent.futures.wait([self._under_way], self._config.broadcast_timeout_s)
        self._sender.close()
        if self._archiver is not None:
            self._archiver.close()
        self._pull_server.close()

    def _submit(self, version: WeightVersion, gathering: Gathering, probe: Probe) -> Future[PublishReport]:
        def attempt() -> PublishReport:
            started = time.monotonic()
            try:
                if self._announced is not None and version <= self._announced.version:
                    raise VersionRegressionError(
                        f"version {version} is not newer than {self._announced.version}, published before"
                    )
                with torch.cuda.stream(self._stream):
                    report = self._publish(version, gathering, probe)
            except BaseException:
                self._pull_server.forget(version)
                raise
            return replace(report, seconds=time.monotonic() - started)

        self._under_way = self._thread.submit(attempt)
        return self._under_way

    def _publish(self, version: WeightVersion, gathering: Gathering, probe: Probe) -> PublishReport:
        # Members refuse a version that they took already, so a repeated publication is only announced.
        is_repeated = self._offered == version
        places = gathering.places()
        epoch, failed = (0, "repeated" if is_repeated else "")
        if not is_repeated and self._config.trust == "members":
            epoch, failed = self._sender.prepare(self._workers, version)
        offer = self._manifest(version, places.tensors, places.sizes, probe, epoch)
        if self._announced is not None and self._announced.tensors is places.tensors:
            offer = msgspec.structs.replace(offer, tensors=(), buckets=(), like=self._announced.version)
        self._blocking.call(self._versions.offer(self._owner, offer))
        self._offered = version
        members: tuple[str, ...] = ()
        if epoch:
            members, failure = self._sender.send(version, lambda: _on_the_wire(version, gathering))
            failed = "; ".join(filter(None, (failed, failure)))
        staged = gathering.staged()
        self._pull_server.serve(version, staged.buckets)
        base, deltas, archived = self._deltas(version, staged)
        announced = msgspec.structs.replace(
            self._manifest(version, staged.tensors, staged.sizes, probe, epoch),
            fingerprints=staged.fingerprints,
            digests=self._digests(staged),
            base=self._base,
            deltas=tuple(delta.spec for delta in deltas),
            archived=archived,
        )
        self._blocking.call(self._versions.announce(self._owner, announced))
        if self._announced is None:
            logger.info("version %s is the first that is announced", version)
        self._announced = announced
        self._pull_server.keep_only(version, _by_version(deltas))
        self._chain.advance(version, base, deltas)
        return PublishReport(version, 0.0, staged.nbytes, members, failed)

    def _deltas(
        self, version: WeightVersion, staged: StagedWeights
    ) -> tuple[StagedWeights | None, tuple[Delta, ...], Archived | None]:
        """Return the base for the next version's delta, the chain of deltas that ends at this version, and what of the
        chain is in the archive.

        Deltas are encoded and archived only while a worker follows by pull; a whole version is archived also while some
        worker holds no version yet. This comes after the broadcast, so that its members do not wait for it.
        """
        workers = self._workers()
        reads_archive = self._archiver is not None and any(info.version is None for info in workers)
        if not (reads_archive or any(map(follows_by_pull, workers))):
            if self._archiver is not None:
                self._archiver.clear()
            return None if self._memory_is_reused else staged, (), None
        base = staged.on_cpu()
        deltas = self._chain.extended(version, base, Deadline(self._config.broadcast_timeout_s))
        self._pull_server.serve_deltas(_by_version(deltas))
        return base, deltas, None if self._archiver is None else self._archiver.add(version, base, deltas)

    def _manifest(
        self,
        version: WeightVersion,
        tensors: tuple[TensorSpec, ...],
        buckets: tuple[int, ...],
        probe: Probe,
        epoch: int,
    ) -> WeightManifest:
        return WeightManifest(
            version=version,
            tensors=tensors,
            buckets=buckets,
            probe=probe,
            group_epoch=epoch,
            adapter_scale=self._adapter_scale,
            pull_url=self._pull_server.url,
            pull_token=self._token,
            pull_certificate=self._pull_server.certificate,
        )

    def _digests(self, staged: StagedWeights) -> tuple[str, ...]:
        """Return the digests of a version's buckets; none where workers are trusted."""
        if self._config.trust == "members":
            return ()
        with ThreadPoolExecutor(_DIGESTS_AT_ONCE) as threads:  # hashlib lets other threads run
            return tuple(threads.map(sha256_of, staged.buckets))

    def _workers(self) -> tuple[WorkerInfo, ...]:
        return self._blocking.call(self._blocking.broker.status.workers())

    def _put_group(self, group: BroadcastGroup) -> None:
        self._blocking.call(self._versions.put_group(self._owner, group))

    def _last_epoch(self) -> int:
        group = self._blocking.call(self._versions.group())
        return 0 if group is None else group.epoch


def _on_the_wire(version: WeightVersion, gathering: Gathering) -> Iterator[torch.Tensor]:
    device = torch.device("cpu")
    for bucket in gathering.buckets():
        device = bucket.device
        yield bucket
    yield seal(version, gathering.staged().fingerprints, device)


def _by_version(deltas: Iterable[Delta]) -> dict[WeightVersion, bytes]:
    return {delta.spec.version: delta.data for delta in deltas}
