"""Examples of supervised training from a user's own function, in a process that can be killed."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import msgspec

from headway.broker.errors import ConfigError
from headway.broker.user_code.import_paths import ImportRoots, import_directory
from headway.broker.user_code.pool import BlockingHost
from headway.broker.user_code.protocol import Program
from headway.learner.config import SftPhaseConfig

AT_ONCE = 16
_KEY = "sft.phases.kind"


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """A question, and the answer that the model learns to give."""

    query: str
    """The text that the model reads; the chat template renders it."""
    response: str
    """The text that is trained, without the token that ends it."""


def own_examples(config: SftPhaseConfig, seed: int) -> Iterator[Example]:
    """Yields the examples of `config.kind`, as many as there are. Raises ConfigError at once if there is no such
    function; later UserCodeError if it raises, ends its process, or takes longer than `sft.phases.deadline_s` for
    AT_ONCE examples."""
    program = Program(
        name=f"sft.phases.kind={config.kind}",
        factory=f"{__name__}:OpenedExamples",
        arguments={"kind": config.kind, "path": config.path, "seed": seed, "options": config.options},
        import_path=str(import_directory()),
    )
    return _yielded(BlockingHost(program, deadline_s=config.deadline_s))


def _yielded(host: BlockingHost) -> Iterator[Example]:
    """Yields the host's examples. Each call is made once: in another process the examples would begin anew."""
    while given := msgspec.convert(host.call("next", AT_ONCE), list[Example]):
        yield from given


class OpenedExamples:
    """The user's function, in the process where it runs. It has no methods that a seam could promise, so its result is
    checked here."""

    places = 1

    def __init__(self, kind: str, path: str, seed: int, options: dict[str, Any]) -> None:
        made = ImportRoots((kind,)).load(kind, _KEY)(path=path, seed=seed, **options)
        if not isinstance(made, Iterable):
            raise ConfigError(
                f"{_KEY}: {kind!r} returned a {type(made).__name__}, which yields nothing; what it must yield stands in"
                f" {Example.__module__}:{Example.__name__}."
            )
        self._examples = iter(made)

    def next(self, count: int) -> Any:
        """Returns the next `count` examples, fewer at the end."""
        given = msgspec.to_builtins(list(islice(self._examples, count)))
        msgspec.convert(given, list[Example])  # raises for an item that is no example
        return given
