"""A chat template is a program in Jinja: of the model's, or of the user's own in place of that. It may be wrong, and it
may never end."""

import ctypes
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from headway.broker.errors import ConfigError

T = TypeVar("T")
WHERE = "model.chat_template"
RENDER_S = 10.0
"""The longest time for one conversation, which takes milliseconds."""


class RenderWatch:
    """Runs templates, one at a time, and ends one that does not end by itself.

    The template runs in the caller's thread, since another thread would have to be woken for each conversation. A
    thread that looks at the clock raises an exception in it.
    """

    def __init__(self, seconds: float = RENDER_S) -> None:
        self._seconds = seconds
        self._turn, self._lock = threading.Lock(), threading.Lock()
        self._running: tuple[float, int] | None = None
        """The time at which the template is to be ended, and the thread in which it runs."""
        self._is_ended = False
        self._watch: threading.Thread | None = None

    def run(self, render: Callable[[], T], whose: str) -> T:
        """Returns what `render` returns. Raises ConfigError, with `whose` template it is, if that does not end in time,
        and what `render` raises."""
        with self._turn:
            try:
                try:
                    self._begin()
                    return render()
                finally:
                    self._end()
            except _Ended:
                self._is_ended = False
                raise ConfigError(
                    f"{whose} did not end within {self._seconds:g} s for one conversation. Is there a loop in it that"
                    " does not end, or one within another?"
                ) from None

    def _begin(self) -> None:
        self._running = (time.monotonic() + self._seconds, threading.get_ident())
        if self._watch is None:
            check_s, owner = min(self._seconds / 4, 1.0), weakref.ref(self)
            self._watch = threading.Thread(target=_watch, args=(owner, check_s), name="chat-template", daemon=True)
            self._watch.start()

    def _end(self) -> None:
        """Returns once no exception can reach this thread any more, unless it has."""
        with self._lock:
            self._running = None
        while self._is_ended and not isinstance(sys.exception(), _Ended):
            time.sleep(0.001)

    def check(self) -> None:
        """Ends the template that runs too long."""
        with self._lock:
            if self._running is not None and time.monotonic() > self._running[0]:
                thread, self._running, self._is_ended = self._running[1], None, True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Ended))


class _Ended(BaseException):
    """It is raised in the midst of a template that did not end, which may catch no other exception."""


def _watch(owner: "weakref.ref[RenderWatch]", check_s: float) -> None:
    while (watch := owner()) is not None:
        watch.check()
        del watch
        time.sleep(check_s)


def read_chat_template(path: str) -> str:
    """Returns the Jinja template in a file. Raises ConfigError for a file that cannot be read, or parsed."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{WHERE}: {path} cannot be read: {error}. Give a text file with a Jinja template."
        ) from error
    _check_syntax(text, path)
    return text


def _check_syntax(text: str, path: str) -> None:
    """Raises ConfigError where transformers cannot parse the template. What it makes of a conversation is told when
    one is rendered: it may well refuse the one tried here."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    conversation = [[{"role": "user", "content": "text"}]]
    try:
        RenderWatch().run(
            lambda: render_jinja_template(conversations=conversation, chat_template=text),
            f"{WHERE}: the template in {path}",
        )
    except TemplateSyntaxError as error:
        raise ConfigError(f"{WHERE}: {path}, line {error.lineno}: {error.message}") from error
    except ConfigError:
        raise
    except Exception:  # noqa: BLE001 - a template may refuse these messages in any way
        return
