"""Rich's tables, panels and styles, without what a terminal would obey in the texts that they hold."""

from typing import Any

from rich.console import Console
from rich.text import Text

from .printing import told, visible


def styled(*parts: str | tuple[str, str]) -> Text:
    """Texts end to end, those with a style in it."""
    return Text.assemble(*(visible(part) if isinstance(part, str) else (visible(part[0]), part[1]) for part in parts))


class Terminal(Console):
    """Rich's console, to which a text is a text. What has a style comes from `styled`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """As rich does it, of what is visible."""
        return super().render_str(visible(text), **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich does it. Raises HeadwayError where the output takes no more."""
        with told():
            super().print(*objects, **options)
