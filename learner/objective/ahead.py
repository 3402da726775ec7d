"""Values that are made in their order by a thread, ahead of a caller that takes them one after the other."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar, overload

T = TypeVar("T")


class Ahead(Sequence[T], Generic[T]):
    """The first value is made by the caller at once. A value that cannot be made raises where it is asked for."""

    def __init__(self, makers: Iterable[Callable[[], T]]) -> None:
        first, *others = makers
        self._first = first()
        self._others: list[Future[T]] = []
        if others:
            thread = ThreadPoolExecutor(1, thread_name_prefix="ahead")
            self._others = [thread.submit(maker) for maker in others]
            thread.shutdown(wait=False)  # it ends after the last of them

    def __len__(self) -> int:
        return 1 + len(self._others)

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        number = range(len(self))[index]
        return self._others[number - 1].result() if number else self._first

    def __iter__(self) -> Iterator[T]:
        return (self[number] for number in range(len(self)))
