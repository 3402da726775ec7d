"""Rich's tables, panels and styles, with the characters in texts escaped that a terminal would obey.

Tables keep words whole on a narrow terminal: a name that is cut in two cannot be copied or searched for.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from .printing import output_errors, visible


def styled(*parts: str | tuple[str, str]) -> Text:
    """Return texts end to end; a pair is a text with its style."""
    return Text.assemble(*(visible(part) if isinstance(part, str) else (visible(part[0]), part[1]) for part in parts))


def headed_table(*texts: str, numbers: Sequence[str] = (), title: str | None = None) -> Table:
    """Return an empty table with headings: columns of texts, which fold, and then columns of numbers."""
    table = Table(title=title, title_justify="left", caption_justify="left", box=SIMPLE_HEAD)
    for heading in texts:
        table.add_column(heading, overflow="fold")
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table


class Terminal(Console):
    """Rich's console without markup in texts. Styled texts come from `styled`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Render as rich does, with such characters escaped."""
        return super().render_str(visible(text), **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich does. Raises HeadwayError if the output takes no more."""
        with output_errors():
            super().print(*objects, **options)


_ANY_WIDTH = 100_000


class WordWrapTable:
    """Renders a table without breaking words: columns get at least their longest word. Where even these do not fit side
    by side, every row is a paragraph of its first cell, and then of headings and cells."""

    def __init__(self, table: Table, wider: Table | None = None) -> None:
        """`wider` is the table with further columns, which is shown instead where they fit, and in paragraphs."""
        self._table, self._wider = table, wider

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for table in filter(None, (self._wider, self._table)):
            if _fit(console, options, table):
                yield table
                return
        table = self._wider or self._table
        yield from _paragraphs(table, _texts(console, table))


def _fit(console: Console, options: ConsoleOptions, table: Table) -> bool:
    """Give the columns their widths; False where their longest words do not fit side by side."""
    texts = _texts(console, table)
    whole = [max(map(_width, column)) for column in texts]
    words = [max(_width(word) for cell in column for word in cell.split() or [""]) for column in texts]
    words = [max(least, column.min_width or 0) for least, column in zip(words, table.columns, strict=True)]
    whole = [max(pair) for pair in zip(whole, words, strict=True)]
    room = options.max_width - _frame_width(console, options, table, whole)
    if sum(words) > room:
        return False
    for column, width in zip(table.columns, _shared(words, whole, room), strict=True):
        column.width, column.no_wrap = width, False
    return True


def _texts(console: Console, table: Table) -> list[list[str]]:
    """Return the heading and the cells of each column."""
    return [[_plain(console, cell) for cell in (column.header, *column.cells)] for column in table.columns]


def _plain(console: Console, cell: RenderableType) -> str:
    """Return a cell's text as it is shown. Cells of our tables are texts."""
    return console.render_str(cell).plain if isinstance(cell, str) else getattr(cell, "plain", "")


def _width(text: str) -> int:
    return max((cell_len(line) for line in text.split("\n")), default=0)


def _frame_width(console: Console, options: ConsoleOptions, table: Table, whole: Sequence[int]) -> int:
    """Return the columns of the terminal that borders and padding take."""
    for column in table.columns:
        column.width = None
    return Measurement.get(console, options.update(max_width=_ANY_WIDTH), table).maximum - sum(whole)


def _shared(words: Sequence[int], whole: Sequence[int], room: int) -> list[int]:
    """Return the columns' widths: what is left beyond the longest words goes to the columns that could use more."""
    wanted = [most - least for least, most in zip(words, whole, strict=True)]
    spare = min(room - sum(words), sum(wanted))
    return [least + spare * more // max(1, sum(wanted)) for least, more in zip(words, wanted, strict=True)]


def _paragraphs(table: Table, texts: Sequence[Sequence[str]]) -> Iterator[RenderableType]:
    if table.title:
        yield styled((f"{table.title}", "italic"))
    headings = [column[0] for column in texts]
    for first, *cells in zip(*(column[1:] for column in texts), strict=True):
        yield styled((f"{headings[0]} {first}".strip(), "bold"))
        told = [f"{heading} {cell}".strip() for heading, cell in zip(headings[1:], cells, strict=True) if cell]
        yield Padding(styled(", ".join(told)), (0, 0, 0, 2))
    if table.caption:
        yield styled(f"{table.caption}")
    yield ""
