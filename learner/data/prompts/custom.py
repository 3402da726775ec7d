"""A custom prompt source runs in a process that can be killed, so that a hub that hangs cannot stop the learner."""

from typing import Any

import msgspec

from headway.broker.user_code.host import Program
from headway.broker.user_code.import_paths import import_directory, load_custom
from headway.broker.user_code.pool import BlockingHost
from headway.learner.config import PromptsConfig

from .base import Item, PromptSource

OPEN_S = 1800.0
"""The deadline of the source's constructor, which may read a large data set."""


class CustomPrompts:
    """A source `package.module:Class`, called as Class(path=, seed=, **options) in a process of its own.

    A call that raises, runs past `prompts.deadline_s` or ends that process is made once more; a second failure raises
    UserCodeError.
    """

    def __init__(self, config: PromptsConfig, seed: int) -> None:
        program = Program(
            name=f"prompts.kind={config.kind}",
            factory=f"{__name__}:PromptSourceHost",
            arguments={"kind": config.kind, "path": config.path, "seed": seed, "options": config.options},
            import_path=str(import_directory()),
            open_s=OPEN_S,
        )
        self._host = BlockingHost(program, deadline_s=config.deadline_s)
        self._size: int | None = self._host.call_again("size")

    @property
    def size(self) -> int | None:
        return self._size

    def train(self, epoch: int, position: int) -> Item:
        return msgspec.convert(self._host.call_again("train", epoch, position), Item)

    def held_out(self, count: int) -> list[Item]:
        return msgspec.convert(self._host.call_again("held_out", count), list[Item])


class PromptSourceHost:
    """The source in the process where it runs, which checks its results and sends them as plain data."""

    places = 1

    def __init__(self, kind: str, path: str, seed: int, options: dict[str, Any]) -> None:
        self._source: PromptSource = load_custom(
            kind, PromptSource, "prompts.kind", lambda own: own(path=path, seed=seed, **options)
        )

    def size(self) -> int | None:
        """See PromptSource."""
        return msgspec.convert(self._source.size, int | None)

    def train(self, epoch: int, position: int) -> Any:
        """See PromptSource."""
        return _plain(self._source.train(epoch, position))

    def held_out(self, count: int) -> list[Any]:
        """See PromptSource."""
        return [_plain(item) for item in self._source.held_out(count)]


def _plain(item: Item) -> Any:
    plain = msgspec.to_builtins(item)
    msgspec.convert(plain, Item)  # raises for an object that is no item
    return plain
