"""The places of an engine's adapters: the version that each holds, and how many requests it computes.

A request keeps its place. A new version takes one that no request needs, so running requests finish with theirs; where
all are needed it takes that of the oldest version, whose requests go on with the new one.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from headway.broker.errors import WeightSyncError
from headway.broker.schema import WeightVersion


class AdapterPlaces:
    """The places 1 to `count`; 0 is the place of requests that are computed without an adapter."""

    def __init__(self, count: int, engine: str) -> None:
        """`engine`: its name, for errors."""
        self.newest = 0
        """The place of requests that begin now."""
        self.base_is_new = False
        """Whether no adapter has come since the engine got its base."""
        self._count = count
        self._engine = engine
        self._changing = 0
        """The place that `next` has given and that holds no version yet; 0: none."""
        self._versions: dict[int, WeightVersion] = {}
        self._requests = Counter[int]()

    def next(self) -> int:
        """Return the place for a new version: the same one until it holds a version, since a load that has failed may
        have left anything there."""
        never = WeightVersion(0, 0)
        self._changing = self._changing or min(
            range(1, self._count + 1), key=lambda place: (self.is_needed(place), self._versions.get(place, never))
        )
        return self._changing

    def is_needed(self, place: int) -> bool:
        """Return whether a request is computed with what the place holds."""
        return self._requests[place] > 0

    def is_open(self, place: int) -> bool:
        """Return whether requests are computed with what the place holds, or may begin there before a pause."""
        return self.is_needed(place) or place == self.newest

    @property
    def are_needed(self) -> bool:
        """Whether any request runs."""
        return any(self._requests.values())

    def check_there_are(self) -> None:
        """Raise WeightSyncError if the engine was started without a place for adapters."""
        if not self._count:
            raise WeightSyncError(
                f"{self._engine} was started without adapters, and the run's versions are adapters: set"
                " weights.adapter=merged, or start the worker with the run's own configuration"
            )

    def check_are_unused(self) -> None:
        """Raise WeightSyncError if requests name adapters, which whole weights do not replace."""
        if self.newest:
            raise WeightSyncError("this engine's requests are computed with an adapter: give it adapters alone")

    def check_base_is_free(self) -> None:
        """Raise WeightSyncError if requests run that no adapter of another base would go on with."""
        if self.are_needed and (self._count > 1 or not self.newest):
            raise WeightSyncError("another base has come while requests run that keep theirs: restart the worker")

    def check_adapter_may_come(self) -> None:
        """Raise WeightSyncError if a request has begun since another base came."""
        if self.base_is_new:
            self.check_base_is_free()

    def hold(self, place: int, version: WeightVersion) -> None:
        """Compute with this version in the place, and begin requests there."""
        self._versions[place], self.newest, self._changing = version, place, 0
        self.base_is_new = self.base_is_new and not place

    def version(self, place: int) -> WeightVersion:
        """Return the version that the place holds; of place 0, which has the base of all, that of the newest place."""
        return self._versions[place or self.newest]

    @contextmanager
    def kept(self, place: int | None = None) -> Iterator[int]:
        """Keep a place (None: the newest) for one request, and yield it."""
        place = self.newest if place is None else place
        self._requests[place] += 1
        try:
            yield place
        finally:
            self._requests[place] -= 1
