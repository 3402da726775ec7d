"""Rows that hold a completion that is desirable or not."""

from headway.learner.data.records.base import Labelled, Message
from headway.learner.data.texts.messages import check_turns

from .reader import RowReader, alike, alpaca_prompt, said


def unpaired(reader: RowReader) -> list[Labelled]:
    label = reader.label()
    if "prompt" not in reader.row:  # the prompt may be the first messages of the completion
        messages = reader.messages("completion")
        return _last(messages, label, reader)
    prompt, completion = alike(reader, "prompt", "completion")
    return [Labelled(prompt=prompt, completion=completion, label=label, place=reader.place)]


def labelled_chat(reader: RowReader) -> list[Labelled]:
    return _last(reader.messages("messages"), reader.label(), reader)


def labelled_sharegpt(reader: RowReader) -> list[Labelled]:
    return _last(reader.messages("conversations"), reader.label(), reader)


def labelled_alpaca(reader: RowReader) -> list[Labelled]:
    return _last([*alpaca_prompt(reader), said("assistant", reader.text("output"))], reader.label(), reader)


def _last(messages: list[Message], label: bool, reader: RowReader) -> list[Labelled]:
    """Returns a conversation whose last turn is labelled."""
    check_turns(messages, reader.place, ends_with="assistant")
    return [
        Labelled(
            prompt=messages[:-1],
            completion=messages[-1:],
            label=label,
            place=reader.place,
        )
    ]
