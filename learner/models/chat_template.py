"""A chat template is a program in Jinja: of the model's, or of the user's own in place of that. It may be wrong, and it
may never end."""

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as LateError
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from broker.errors import ConfigError

T = TypeVar("T")
WHERE = "model.chat_template"
RENDER_S = 10.0
"""The longest time for one conversation, which takes milliseconds."""


class RenderThread:
    """Runs templates, one at a time, in a thread that is ended where a template does not end."""

    def __init__(self, seconds: float = RENDER_S) -> None:
        self._seconds = seconds

    def run(self, render: Callable[[], T], whose: str) -> T:
        """Returns what `render` returns. Raises ConfigError, with `whose` template it is, if that does not end in time,
        and what `render` raises."""
        threads: list[int] = []

        def started() -> T:
            threads.append(threading.get_ident())
            return render()

        future = self._thread.submit(started)
        try:
            return future.result(self._seconds)
        except LateError:
            self._end(threads)
            raise ConfigError(
                f"{whose} did not end within {self._seconds:g} s for one conversation. Is there a loop in it that does"
                " not end, or one within another?"
            ) from None

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="chat-template")

    def _end(self, threads: list[int]) -> None:
        """Raises an exception in the thread, at its next instruction: the process could not end before it does."""
        self.__dict__.pop("_thread").shutdown(wait=False)
        for thread in threads:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(SystemExit))


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

    tried = [[{"role": "user", "content": "text"}]]
    try:
        RenderThread().run(
            lambda: render_jinja_template(conversations=tried, chat_template=text), f"{WHERE}: the template in {path}"
        )
    except TemplateSyntaxError as error:
        raise ConfigError(f"{WHERE}: {path}, line {error.lineno}: {error.message}") from error
    except ConfigError:
        raise
    except Exception:  # noqa: BLE001 - a template may refuse these messages in any way
        return
