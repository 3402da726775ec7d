"""One row of a file, and what several layouts take out of it: prompts, completions, numbers."""

import math
from typing import Any

from headway.learner.data.records.base import Content, Message, Row, RowError, shown
from headway.learner.data.texts.messages import Tags, check_turns, read_content, to_messages


class RowReader:
    """One row with its place; takes columns of stated types out of it. All methods raise RowError."""

    def __init__(self, row: Row, place: str, tags: Tags) -> None:
        self.row = {name: value for name, value in row.items() if value is not None}
        self.place, self.tags = place, tags

    def text(self, column: str, default: str | None = None) -> str:
        """Returns a column's text; `default`, where it is given, for one that is missing or empty."""
        value = self.row.get(column, "" if default is not None else None)
        if default is not None and value == "":
            return default
        if not isinstance(value, str):
            raise self.error(f"whose {column!r} is no text", f"{column!r} is {shown(value)}", "Write it as text.")
        if not value.strip():
            raise self.error(f"with an empty {column!r}", f"{column!r} is empty", "Write its text, or leave it out.")
        return value

    def content(self, column: str) -> Content:
        """Returns a column that is a text or messages."""
        value = self.row.get(column)
        return read_content(self.text(column) if isinstance(value, str) else value, self.place, column, self.tags)

    def messages(self, column: str) -> list[Message]:
        """Returns a column that is messages, or one of them."""
        content = self.content(column)
        return content if isinstance(content, list) else to_messages(content, self.place, column, self.tags)

    def number(self, value: Any, column: str) -> float:
        """Returns a value of a column as a finite number."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(
                f"whose {column!r} is no finite number", f"{column!r} has {shown(value)}", "Write a finite number."
            )
        return float(value)

    def label(self) -> bool:
        """Returns the truth value of `label` or `kto_tag`."""
        column = "label" if "label" in self.row else "kto_tag"
        value = self.row.get(column)
        if not isinstance(value, bool):
            raise self.error(
                f"whose {column!r} is no truth value",
                f"{column!r} is {shown(value)}",
                "Write true for desirable, false for undesirable.",
            )
        return value

    def error(self, reason: str, fault: str, remedy: str) -> RowError:
        """Returns the error of this row."""
        return RowError(self.place, reason, fault, remedy)


def alpaca_prompt(reader: RowReader) -> list[Message]:
    """Returns history and the question that `instruction` and `input` make."""
    asked = [reader.text("instruction", ""), reader.text("input", "")]
    if not any(asked):
        raise reader.error("with an empty prompt", "'instruction' and 'input' are empty", "Write one of them.")
    messages: list[Message] = []
    history = reader.row.get("history") or []
    if not isinstance(history, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
        raise reader.error(
            "whose 'history' is no list of pairs", f"'history' is {shown(history)}", "Write [[question, answer], ...]."
        )
    for question, answer in history:
        messages += to_messages([said("user", question), said("assistant", answer)], reader.place, "history", Tags())
    return [*messages, said("user", "\n".join(text for text in asked if text))]


def said(role: str, content: Any) -> Message:
    """Returns one message."""
    return {"role": role, "content": content}


def alike(reader: RowReader, *columns: str) -> list[Content]:
    """Returns a prompt and its completions: all texts, or all messages. A text that stands among messages is one of
    them."""
    values = [reader.content(column) for column in columns]
    if all(isinstance(value, str) for value in values):
        return values
    prompt, *completions = (
        value if isinstance(value, list) else [said("assistant" if number else "user", value)]
        for number, value in enumerate(values)
    )
    check_turns(prompt, reader.place, ends_with="prompt")
    for completion in completions:
        check_turns([*prompt, *completion], reader.place, ends_with="assistant")
    return [prompt, *completions]
