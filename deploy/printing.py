"""Headway prints only through this module and `terminal.py`, so that a terminal obeys nothing but Headway's own styles.

Names, errors and reports come from workers, servers, recipes and files. Characters in them that would move a cursor,
ring a bell, or colour or reverse later text are shown as an escape such as \\x1b, and brackets are never markup.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click
import msgspec

from headway.broker.errors import HeadwayError

_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls of C0, except tab and new line, and of C1
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # line ends and changes of direction
    "\ud800-\udfff]"  # halves of characters, which no output takes
)
PLAIN, OF_ROLES = "%(message)s", "%(asctime)s %(message)s"


def visible(text: str) -> str:
    """Return the text with an escape for every character that a terminal would obey; tabs and new lines stay."""
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def paragraph(text: str) -> str:
    """Return the same in one line."""
    return visible(re.sub(r"\s*[\r\n]+\s*", " ", text.strip()))


def say(text: str, *, to_stderr: bool = False, ends_line: bool = True) -> None:
    """Print a line, or several, or a piece of one. Raises HeadwayError if the output takes no more; click handles a
    reader that has left."""
    with output_errors():
        click.echo(visible(text), err=to_stderr, nl=ends_line)


def complain(text: str) -> None:
    """Print a paragraph on stderr. If stderr takes no more, the paragraph is lost."""
    with suppress(HeadwayError, BrokenPipeError):
        say(text, to_stderr=True)


def say_json(content: Any, *, in_one_line: bool = False) -> None:
    """Print JSON for programs; numbers that JSON lacks become null. Raises as `say` does."""
    encoded = msgspec.json.encode(content)
    text = (encoded if in_one_line else msgspec.json.format(encoded)).decode()
    with output_errors():
        click.echo(_OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}" if found[0] >= "\x7f" else found[0], text))


def log_to_stderr(level: int = logging.WARNING, form: str = PLAIN) -> None:
    """Log to stderr what any part logs from `level` on. The last call of this function counts."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Visible(form, "%H:%M:%S"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger(
        "huggingface_hub"
    ).propagate = False  # it has a handler of its own, and would log everything twice
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # it tells of every list of fonts that it makes


class _Visible(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


@contextmanager
def output_errors() -> Iterator[None]:
    """Turn the error of an output that takes no more into a HeadwayError."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise HeadwayError(f"The output cannot be written: {error.strerror or error}.") from error
