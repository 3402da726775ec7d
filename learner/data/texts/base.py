"""A message, and the error of a row that says nothing that a model can get."""

from typing import Any

import msgspec

from headway.broker.errors import ConfigError

Message = dict[str, Any]
"""`{"role": ..., "content": ...}`, as chat templates take it."""
Content = str | list[Message]
"""A text that is tokenized as it is, or messages that the model's chat template renders."""
SHOWN = 80


class Templated(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of a chat template besides messages, as a prompt or a record states them."""

    tools: list[dict[str, Any]] = []
    """Descriptions of functions, as chat templates take them."""
    chat_template_kwargs: dict[str, Any] = {}
    """Values of further names that the template reads, such as `enable_thinking`."""

    @property
    def columns(self) -> list[str]:
        """The columns of a row that said any of it."""
        return [name for name in Templated.__struct_fields__ if getattr(self, name)]


NOTHING = Templated()
"""No tools, and no further names."""


class RowError(ConfigError):
    """A row is no record and no prompt. The message names the place, the fault and the remedy."""

    def __init__(self, place: str, reason: str, fault: str, remedy: str) -> None:
        """`reason` is the fault without values of the row, by which skipped rows are counted."""
        super().__init__(f"{place}: {fault}. {remedy}")
        self.reason = reason


def shown(value: Any) -> str:
    """Returns a value's text, cut short, since a row may hold a book."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
