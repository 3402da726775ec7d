"""Rich's tables, panels and styles, with the characters in texts escaped that a terminal would obey."""

from typing import Any

from rich.console import Console
from rich.text import Text

from .printing import told, visible


def styled(*parts: str | tuple[str, str]) -> Text:
    """Return texts end to end; a pair is a text with its style."""
    return Text.assemble(*(visible(part) if isinstance(part, str) else (visible(part[0]), part[1]) for part in parts))


class Terminal(Console):
    """Rich's console without markup in texts. Styled texts come from `styled`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Render as rich does, with such characters escaped."""
        return super().render_str(visible(text), **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich does. Raises HeadwayError if the output takes no more."""
        with told():
            super().print(*objects, **options)
