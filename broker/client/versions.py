"""The learner offers and announces weight versions by compare-and-set, and stores the blobs that go with them:
manifests, the broadcast group, the model's files."""

import asyncio
import logging
import secrets
from contextlib import suppress
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from headway.broker.connection.connection import Connection
from headway.broker.errors import FrameError, SchemaMismatchError, VersionRegressionError
from headway.broker.owner import Owner
from headway.broker.schema import WeightVersion
from headway.broker.schema.weights import BroadcastGroup, ModelFiles, WeightManifest
from headway.broker.wire.codec import decode, encode

log = logging.getLogger(__name__)

_STAGED_TTL_S = 60
T = TypeVar("T", WeightManifest, BroadcastGroup, ModelFiles)


class Glance(NamedTuple):
    """The newest versions, and which broadcast group is stored."""

    offered: WeightVersion | None
    announced: WeightVersion | None
    group: bytes | None
    """Another text whenever a group is stored, so that no worker reads all its members again and again."""


class Versions:
    """The run's weight versions, and the broadcast group that receives them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._put: dict[str, bytes] = {}
        """The blobs that this client stored, to store again after a server lost its last second."""
        self._storing = asyncio.Lock()
        """Stores one blob at a time: an old blob that is restored must not replace a newer one."""

    async def offer(self, owner: Owner, manifest: WeightManifest) -> None:
        """Offers a version before its broadcast: the members of the manifest's group epoch start receiving. Idempotent.

        Raises VersionRegressionError unless newer than everything announced and offered, FencedError.
        """
        await self._swap("offered", owner, manifest)

    async def announce(self, owner: Owner, manifest: WeightManifest) -> None:
        """Announces that a version is complete and may be used; admission follows it. Idempotent; raises as `offer`
        does."""
        await self._swap("announced", owner, manifest)

    async def offered(self) -> WeightManifest | None:
        """Returns the offered manifest. This and the next two raise ForeignRunError: equal versions of two runs are
        different weights."""
        return await self._get("manifest:offered", WeightManifest)

    async def announced(self) -> WeightManifest | None:
        return await self._get("manifest:announced", WeightManifest)

    async def glance(self) -> "Glance":
        """Returns what the learner says of its weights, in one cheap round trip."""
        _, *held, group = await self._connection.script("glance", absent=[None] * 6)
        return Glance(_version(held[0], held[1]), _version(held[2], held[3]), group)

    async def current(self) -> tuple[WeightVersion | None, WeightVersion | None]:
        """Returns (offered, announced)."""
        offered, announced, _ = await self.glance()
        return offered, announced

    async def put_group(self, owner: Owner, group: BroadcastGroup) -> None:
        await self._store("broadcast", owner, encode(replace(group, identity=self._connection.identity)))

    async def group(self) -> BroadcastGroup | None:
        return await self._get("broadcast", BroadcastGroup)

    async def put_model(self, owner: Owner, files: ModelFiles) -> None:
        await self._store("model", owner, encode(files))

    async def model(self) -> ModelFiles | None:
        return await self._get("model", ModelFiles)

    def forget(self) -> None:
        """Forgets what was stored under an earlier claim, which this owner may not restore."""
        self._put.clear()

    async def restore(self, owner: Owner) -> None:
        """Stores again what this client stored last (after a re-assertion)."""
        async with self._storing:
            for key, blob in list(self._put.items()):
                if key == "manifest:announced":
                    # The server may have kept a newer announcement whose reply was lost in the crash: that one stays.
                    with suppress(VersionRegressionError):
                        await self._swap_now("announced", owner, decode(blob, WeightManifest))
                else:
                    await put_blob(self._connection, owner, key, blob)

    async def _swap(self, what: str, owner: Owner, manifest: WeightManifest) -> None:
        async with self._storing:
            await self._swap_now(what, owner, manifest)

    async def _swap_now(self, what: str, owner: Owner, manifest: WeightManifest) -> None:
        manifest = replace(manifest, identity=self._connection.identity)
        blob, staged = encode(manifest), f"stage:{secrets.token_hex(8)}"
        version = manifest.version
        await self._connection.learner_script(
            "version",
            owner,
            what,
            version.incarnation,
            version.step,
            staged,
            before=[("SET", self._connection.keys(staged), blob, "EX", _STAGED_TTL_S)],
        )
        if what == "announced":
            self._put["manifest:announced"] = blob

    async def _store(self, key: str, owner: Owner, blob: bytes) -> None:
        async with self._storing:
            await put_blob(self._connection, owner, key, blob)
            self._put[key] = blob

    async def _get(self, key: str, kind: type[T]) -> T | None:
        blob = await self._connection.execute("GET", self._connection.keys(key))
        try:
            if blob is None:
                return None
            held = decode(blob, kind)
            if not isinstance(held, ModelFiles):
                self._connection.check_identity(held.identity)
            return held
        except SchemaMismatchError:
            raise  # two versions of Headway in one run: the operator must act
        except FrameError as error:
            log.warning("%s of run %s is passed over until it is written again: %s", key, self._connection.run, error)
            return None


async def put_blob(connection: Connection, owner: Owner, key: str, blob: bytes, keep: int = 0) -> None:
    """Stores a blob under a key of the run, or with `keep` at the end of a list of that length, while `owner` still
    owns the run."""
    staged = f"stage:{secrets.token_hex(8)}"
    await connection.learner_script(
        "put",
        owner,
        key,
        staged,
        keep,
        before=[("SET", connection.keys(staged), blob, "EX", _STAGED_TTL_S)],
    )


def _version(incarnation: bytes | None, step: bytes | None) -> WeightVersion | None:
    return None if incarnation is None or step is None else WeightVersion(int(incarnation), int(step))
