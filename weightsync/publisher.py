"""The learner's end: stages a version, offers, broadcasts and announces it, and serves it to those who pull.

A broadcast that fails costs its deadline and nothing else. What does raise is what the learner must know:
FencedError, VersionRegressionError, a broker that is gone.
"""

import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from msgspec.structs import replace

from broker import BlockingBroker
from broker.errors import VersionRegressionError
from broker.owner import Owner
from broker.schema import BroadcastGroup, Probe, WeightManifest, WeightVersion, WorkerInfo

from .addresses import learner_addresses
from .chain import Delta, DeltaChain
from .config import WeightsConfig
from .deadline import Deadline
from .membership import follows_by_pull
from .sender import Sender
from .staging import Restaging, StagedWeights, stage
from .transports.pull_server import PullServer


@dataclass(frozen=True)
class PublishReport:
    """What one publication cost and whom it reached."""

    seconds: float
    nbytes: int
    members: tuple[str, ...]
    """Workers that verified every byte before the announcement; all others pull."""
    failed: str
    """Empty, or why some member was not reached by broadcast."""


class Publisher:
    """Belongs to one owner of the run. One call at a time, from one thread."""

    def __init__(self, broker: BlockingBroker, owner: Owner, config: WeightsConfig) -> None:
        self._blocking = broker
        self._versions = broker.broker.versions
        self._owner = owner
        self._config = config
        self._restaging = Restaging(config.bucket_bytes, torch.device("cuda")) if config.staging == "device" else None
        self._token = secrets.token_urlsafe(24)
        self._offered: WeightVersion | None = None
        self._announced: WeightVersion | None = None
        address, interface = learner_addresses(config.host, broker.broker.url)
        self._sender = Sender(
            broker.broker.run,
            owner.incarnation,
            self._last_epoch(),
            address,
            interface,
            config,
            self._put_group,
        )
        self._pulls = PullServer(address, self._token, config.broadcast_timeout_s)
        self._chain = DeltaChain(config.delta_chain)

    def stage(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> StagedWeights:
        """Copy what is to be published; the tensors may change afterwards. Raises WeightSyncError for unusable ones.

        On a GPU there is room for one version: the one before cannot be pulled any more, and who tries waits for this.
        """
        if self._restaging is not None:
            if self._announced is not None:
                self._pulls.forget_buckets(self._announced)
            return self._restaging.stage(tensors)
        return stage(tensors, self._config.bucket_bytes)

    def publish(self, version: WeightVersion, staged: StagedWeights, probe: Probe) -> PublishReport:
        """Make `version` the run's newest. Blocks for at most three broadcast deadlines, and a fourth one for deltas.

        Raises VersionRegressionError, FencedError or BrokerUnavailableError; the newest version stays.
        It may be called again with the same version and tensors after BrokerUnavailableError.
        """
        started = time.monotonic()
        if self._announced is not None and version <= self._announced:
            raise VersionRegressionError(f"{version} is not newer than {self._announced}, published before")
        self._pulls.stage(version, staged.data)
        try:
            members, failed, base, deltas = self._publish(version, staged, probe)
        except BaseException:
            self._pulls.forget(version)
            raise
        # Those in the middle of the version before get 404 for its next bucket and look for this one.
        self._pulls.keep_only(version, _by_version(deltas))
        self._chain.advance(version, base, deltas)
        self._announced = version
        return PublishReport(time.monotonic() - started, staged.nbytes, members, failed)

    def close(self) -> None:
        """Leave the group and stop serving; workers keep what they hold. Idempotent."""
        self._sender.close()
        self._pulls.close()

    def _publish(
        self, version: WeightVersion, staged: StagedWeights, probe: Probe
    ) -> tuple[tuple[str, ...], str, StagedWeights | None, tuple[Delta, ...]]:
        # Members that took a version refuse it the second time, so a repeated publication is only announced.
        is_repeated = self._offered == version
        epoch, failed = (0, "repeated") if is_repeated else self._sender.prepare(self._workers, version)
        manifest = self._manifest(version, staged, probe, epoch)
        self._blocking.call(self._versions.offer(self._owner, manifest))
        self._offered = version
        members: tuple[str, ...] = ()
        if epoch:
            members, failure = self._sender.send(version, staged.data)
            failed = "; ".join(filter(None, (failed, failure)))
        base, deltas = self._deltas(version, staged)
        manifest = replace(manifest, deltas=tuple(delta.spec for delta in deltas))
        self._blocking.call(self._versions.announce(self._owner, manifest))
        return members, failed, base, deltas

    def _deltas(self, version: WeightVersion, staged: StagedWeights) -> tuple[StagedWeights | None, tuple[Delta, ...]]:
        """(what the next ones are told from, those to this version): encoded once the group has its buckets, and only
        while some worker has a use for them."""
        if not any(map(follows_by_pull, self._workers())):
            return staged if self._restaging is None else None, ()
        base = staged.on_cpu()
        deltas = self._chain.extended(version, base, Deadline(self._config.broadcast_timeout_s))
        self._pulls.stage_deltas(_by_version(deltas))
        return base, deltas

    def _manifest(self, version: WeightVersion, staged: StagedWeights, probe: Probe, epoch: int) -> WeightManifest:
        return WeightManifest(
            version=version,
            tensors=staged.tensors,
            buckets=staged.buckets,
            probe=probe,
            group_epoch=epoch,
            pull_url=self._pulls.url,
            pull_token=self._token,
            fingerprints=staged.fingerprints,
        )

    def _workers(self) -> tuple[WorkerInfo, ...]:
        return self._blocking.call(self._blocking.broker.status.workers())

    def _put_group(self, group: BroadcastGroup) -> None:
        self._blocking.call(self._versions.put_group(self._owner, group))

    def _last_epoch(self) -> int:
        group = self._blocking.call(self._versions.group())
        return 0 if group is None else group.epoch


def _by_version(deltas: Iterable[Delta]) -> dict[WeightVersion, bytes]:
    return {delta.spec.version: delta.data for delta in deltas}
