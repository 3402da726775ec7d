"""A worker stores a payload or segment for a while, under a name that a script then records."""

from dataclasses import dataclass

from headway.broker.connection.connection import Command, Connection
from headway.broker.errors import BrokerError
from headway.broker.keys import blob_name
from headway.broker.schema import TrajectoryId


@dataclass
class Storage:
    """See the settings of the same names in `BrokerConfig`; `payload_shards` is the same for all processes of a run."""

    payload_ttl_s: float = 600.0
    """The server forgets after so long a blob that no script has recorded."""
    payload_shards: int = 1
    replicas: int = 0


class Blobs:
    """The blobs of one worker process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.storage = Storage()

    def store(self, kind: str, tid: TrajectoryId, nonce: str, frame: bytes) -> tuple[str, Command]:
        """Returns a name, and the command that stores the frame under it until a script has recorded it."""
        name = blob_name(kind, tid, nonce, self.storage.payload_shards)
        key, ttl_ms = self._connection.keys.blob(name), int(1000 * self.storage.payload_ttl_s)
        return name, ("SET", key, frame, "PX", ttl_ms)

    async def keep(self, names: list[str]) -> None:
        """Keeps recorded blobs: on other shards, where scripts do not reach, they had a time to live until now."""
        if self.storage.payload_shards > 1 and names:
            await self._connection.pipeline([("PERSIST", self._connection.keys.blob(name)) for name in names])

    def lost(self, size: int) -> BrokerError:
        """Returns the error for a blob that was gone each time that the script looked for it."""
        return BrokerError(
            f"The server at {self._connection.url} loses blobs of {size} bytes as soon as they are stored: its "
            "maxmemory-policy must be noeviction."
        )


def shard_of(name: str) -> str:
    """Returns the beginning `N/` of a payload's name, which tells its shard; "" where that is the run's own."""
    return name[: name.index("/") + 1] if name[0] != "p" else ""
