"""What a session's newest requests had in their lists: a request repeats the conversation, and only what is new is
decoded and read."""

from typing import Any

import msgspec

LISTS = ("messages", "tools")
MOST_BYTES = 1 << 20
"""Of a longer request nothing is kept: it would stay in memory, beyond `bodies_bytes`, as long as its session, as JSON,
decoded and read, for each of a worker's 1024 episodes. Few conversations are as long."""


class JsonPart(dict[str, Any]):
    """A JSON object of a list, with what a dialect has read of it."""

    read: dict[str, Any] | None = None


class KnownParts:
    """The parts of a session's last two requests, by their JSON, where these are no longer than MOST_BYTES."""

    def __init__(self) -> None:
        self._newest: dict[tuple[str, bytes], JsonPart] = {}
        self._before: dict[tuple[str, bytes], JsonPart] = {}

    def decoded(self, body: bytes) -> dict[str, Any]:
        """Return the JSON object of a request. Raises msgspec.DecodeError, RecursionError or UnicodeDecodeError."""
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        self._before, self._newest = self._newest, {}
        try:
            return {
                name: self._list(name, value) if name in LISTS else msgspec.json.decode(value)
                for name, value in fields.items()
            }
        finally:
            if len(body) > MOST_BYTES:
                self._newest = {}

    def _list(self, name: str, value: msgspec.Raw) -> Any:
        try:
            items = msgspec.json.decode(value, type=list[msgspec.Raw])
        except msgspec.ValidationError:  # it is no list
            return msgspec.json.decode(value)
        return [self._part(name, bytes(one)) for one in items]

    def _part(self, name: str, encoded: bytes) -> Any:
        known = self._newest.get((name, encoded)) or self._before.get((name, encoded))
        if known is None:
            decoded = msgspec.json.decode(encoded)
            if not isinstance(decoded, dict):
                return decoded
            known = JsonPart(decoded)
        self._newest[name, encoded] = known
        return known
