"""A torch store whose keys lie in the broker: so a process group needs no further port to form, and only users of the
run can join it.

torch calls the store from its own threads while it forms a group, and not for transfers afterwards.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]  # torch's stubs do not re-export it

from broker.client.meetings import Meetings
from broker.errors import BrokerError

T = TypeVar("T")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.02
_LONGEST_VALUE = 1 << 16
"""In bytes. torch stores addresses and names of NCCL groups, which are shorter."""


class BrokerStore(Store):
    """A store over a part of one meeting's words. Its methods raise RuntimeError, as those of torch's own stores do.

    A caller that passes it to torch must keep a reference as long as torch uses it: torch does not keep the Python
    object.
    """

    timeout: timedelta
    """An attribute that torch reads and sets."""

    def __init__(self, call: Callable[..., Any], meetings: Meetings, name: str, part: str, *, leads: bool) -> None:
        super().__init__()
        self._call = call
        self._meetings = meetings
        self._name = name
        self._part = part
        self._leads = leads

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else value
        self._ask(self._meetings.say(self._name, self._part + key, data, leads=self._leads))

    def get(self, key: str) -> bytes:
        (value,) = self._await([key], self.timeout)
        return value

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(self._meetings.count(self._name, self._part + key, amount)))

    def check(self, keys: Sequence[str]) -> bool:
        return None not in self._ask(self._meetings.hear(self._name, [self._part + key for key in keys]))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._await(list(keys), timeout or self.timeout)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(self._meetings.forget(self._name, [self._part + key], leads=self._leads)))

    def clone(self) -> "BrokerStore":
        """Return this store itself: it may be shared."""
        return self

    def _await(self, keys: list[str], timeout: timedelta) -> list[bytes]:
        end, pause_s = time.monotonic() + timeout.total_seconds(), _FIRST_PAUSE_S
        while True:
            values = self._ask(self._meetings.hear(self._name, [self._part + key for key in keys]))
            found = [value for value in values if value is not None and len(value) <= _LONGEST_VALUE]
            if len(found) == len(keys):
                return found
            if time.monotonic() >= end:
                raise RuntimeError(f"nothing was said under {', '.join(keys)} within {timeout.total_seconds():.1f} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _ask(self, coroutine: Any) -> Any:
        try:
            return self._call(coroutine)
        except BrokerError as error:
            raise RuntimeError(str(error)) from error
