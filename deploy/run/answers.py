"""The file of a batch inference: a line for each prompt that is done, so that a killed process can go on.

    {"index": 7, "prompt": "...", "prompt_tokens": 5, "responses": [...], "model": "...", "made_from": "..."}

Lines are appended as prompts get done, and once all are done they are brought into the order of the prompts. No prompt
is in the file twice: a process holds the file while it writes, and reads before what an earlier one has left.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from headway.broker.errors import ConfigError, HeadwayError
from headway.learner.checkpoints.disk import free_mib

from .whole_files import append_line, cut_torn_line, replace_file


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled response."""

    text: str
    """Without the token that ended it."""
    tokens: int
    """With that token."""
    finish_reason: Literal["stop", "length"]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt with all of its responses."""

    index: int
    """The prompt's place in its file, from 0."""
    prompt: str
    """The text that the model read."""
    prompt_tokens: int
    responses: tuple[Response, ...]
    model: str
    """The directory of the model."""
    made_from: str
    """A digest of the weights, the prompts and the settings, equal in all lines of a file."""


class AnswersError(HeadwayError):
    """The file cannot be written; the message has the remedy."""


class AnswerFile:
    """The answers that a file holds, and a way to add more."""

    def __init__(self, path: Path, made_from: str) -> None:
        """Read the file, if there is one, and cut a line that a killed process has torn. Raises ConfigError where it
        holds something else than answers made from the same."""
        self._path = path
        self.made_from = made_from
        self.done: set[int] = set()
        """The prompts that the file holds, by index."""
        with self._writing():
            path.parent.mkdir(parents=True, exist_ok=True)
            cut_torn_line(path)
        for answer in self._lines():
            self.done.add(answer.index)

    def add(self, answer: Answer) -> None:
        """Append a prompt. Raises AnswersError, and leaves the file as it was."""
        assert answer.index not in self.done
        with self._writing():
            append_line(self._path, msgspec.json.encode(answer))
        self.done.add(answer.index)

    def put_in_order(self) -> None:
        """Bring the lines into the order of the prompts, durably. Raises AnswersError, and leaves the file as it
        was."""
        lines = sorted((answer.index, msgspec.json.encode(answer)) for answer in self._lines())
        with self._writing():
            replace_file(self._path, b"".join(line + b"\n" for _, line in lines))

    def _lines(self) -> Iterator[Answer]:
        content = self._path.read_bytes().splitlines() if self._path.exists() else []
        for number, line in enumerate(content, start=1):
            try:
                answer = msgspec.json.decode(line, type=Answer)
            except msgspec.DecodeError as error:
                raise ConfigError(
                    f"{self._path}:{number} is no answer of `headway generate`: {error}. Choose another --out."
                ) from error
            if answer.made_from != self.made_from:
                raise ConfigError(
                    f"{self._path} holds answers by {answer.model} that were made from other weights, prompts or"
                    " settings. Choose another --out, or remove the file."
                )
            yield answer

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, HeadwayError) as error:
            cause = error if isinstance(error, OSError) else error.__cause__
            reason = getattr(cause, "strerror", None) or str(error)
            raise AnswersError(
                f"{self._path} could not be written: {reason} ({free_mib(self._path):.0f} MiB are free there). Make"
                " room, or make the place writable, and run the same command again: it goes on with what is missing."
            ) from error
