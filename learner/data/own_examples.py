"""Examples of the warm-up that a function of the user's own yields, in a process that can be killed."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import msgspec

from broker.errors import ConfigError
from broker.user_code.blocking import BlockingHost
from broker.user_code.roots import ImportRoots, import_directory
from broker.user_code.wire import Program
from learner.config import SftPhaseConfig

AT_ONCE = 16
_KEY = "sft.phases.kind"


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """A question, and the answer that the model learns to give."""

    query: str
    response: str


def own_examples(config: SftPhaseConfig, seed: int) -> Iterator[Example]:
    """Of `config.kind`, as long as there are any. Raises ConfigError at once where there is no such function; later
    UserCodeError where it raises, ends its process, or passes `sft.phases.deadline_s` over AT_ONCE examples."""
    program = Program(
        name=f"sft.phases.kind={config.kind}",
        factory=f"{__name__}:OpenedExamples",
        arguments={"kind": config.kind, "path": config.path, "seed": seed, "options": config.options},
        import_path=str(import_directory()),
    )
    return _yielded(BlockingHost(program, deadline_s=config.deadline_s))


def _yielded(host: BlockingHost) -> Iterator[Example]:
    """A call is made once: in another process the examples would begin anew."""
    while given := msgspec.convert(host.call("next", AT_ONCE), list[Example]):
        yield from given


class OpenedExamples:
    """The function where it runs. A function has no methods that a seam could promise, so what it returns is checked
    here."""

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
        """So many more, fewer where they end."""
        given = msgspec.to_builtins(list(islice(self._examples, count)))
        msgspec.convert(given, list[Example])  # raises for what is no example
        return given
