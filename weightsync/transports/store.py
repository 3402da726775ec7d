"""A torch store whose keys lie in the broker: so a process group needs no further port to form, and only its members
and the learner say words in it.

torch calls the store from its own threads while it forms a group, and not for transfers afterwards.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]  # torch's stubs do not re-export it

from headway.broker.client.meetings import NUMBERS, Meetings
from headway.broker.errors import BrokerError

from .words import LONGEST_WORD, Words

T = TypeVar("T")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.02


class BrokerStore(Store):
    """A store over a part of one meeting's words. Its methods raise RuntimeError, as those of torch's own stores do.

    A caller that passes it to torch must keep a reference as long as torch uses it: torch does not keep the Python
    object.
    """

    timeout: timedelta
    """An attribute that torch reads and sets."""

    def __init__(
        self,
        call: Callable[..., Any],
        meetings: Meetings,
        name: str,
        part: str,
        *,
        who: str,
        ranks: Sequence[str],
        words: Words,
    ) -> None:
        """`who` is the one of `ranks` that this process is: LEARNER, which is rank 0, or a member's name. A word that
        `words` refuses makes the call fail that asked for it."""
        super().__init__()
        self._call = call
        self._meetings = meetings
        self._name = name
        self._part = part
        self._who = who
        self._ranks = tuple(ranks)
        self._words = words
        self.refused = ""
        """The member whose word was refused, if any was."""

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else value
        self._own(self._ask(self._meetings.say(self._name, self._who, self._part + key, data)) or None)

    def get(self, key: str) -> bytes:
        (value,) = self._await([key], self.timeout)
        return value

    def add(self, key: str, amount: int) -> int:
        return int(self._own(self._ask(self._meetings.count(self._name, self._who, self._part + key, amount))))

    def check(self, keys: Sequence[str]) -> bool:
        return None not in self._heard(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._await(list(keys), timeout or self.timeout)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(self._meetings.forget(self._name, self._who, self._sayings(key))))

    def clone(self) -> "BrokerStore":
        """Return this store itself: it may be shared."""
        return self

    def _await(self, keys: list[str], timeout: timedelta) -> list[bytes]:
        end, pause_s = time.monotonic() + timeout.total_seconds(), _FIRST_PAUSE_S
        while True:
            found = [value for value in self._heard(keys) if value is not None and len(value) <= LONGEST_WORD]
            if len(found) == len(keys):
                return found
            if time.monotonic() >= end:
                raise RuntimeError(f"nothing was said under {', '.join(keys)} within {timeout.total_seconds():.1f} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _heard(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the word under each key, of the rank that has to say it."""
        asked = [saying for key in keys for saying in self._sayings(key)]
        said = dict(zip(asked, self._ask(self._meetings.hear(self._name, asked)), strict=True))
        return [self._first(key, said) for key in keys]

    def _first(self, key: str, said: dict[tuple[str, str], bytes | None]) -> bytes | None:
        sayings = self._sayings(key)
        for who, name in sayings:
            word = said[who, name]
            if word is None or who == NUMBERS:
                continue
            if len(sayings) == 1 and (fault := self._words.fault(word, len(self._ranks))):
                self.refused = who
                raise RuntimeError(f"the word of {who or 'the learner'} under {name} is refused: {fault}")
            return word
        return said.get((NUMBERS, self._part + key))

    def _sayings(self, key: str) -> list[tuple[str, str]]:
        """Return who may say what lies under `key`, and its name in the meeting."""
        name, rank = self._part + key, self._words.speaker(key)
        if rank is None:
            return [(who, name) for who in (*self._ranks, NUMBERS)]
        if rank >= len(self._ranks):
            raise RuntimeError(f"no rank of {len(self._ranks)} says what lies under {name}")
        return [(self._ranks[rank], name)]

    def _own(self, said: T | None) -> T:
        if said is None:
            raise RuntimeError(f"{self._who} is no member of this group, or another process has its name")
        return said

    def _ask(self, coroutine: Any) -> Any:
        try:
            return self._call(coroutine)
        except BrokerError as error:
            raise RuntimeError(str(error)) from error
