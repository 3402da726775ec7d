"""Rows that hold one conversation, as supervised training takes it."""

from headway.learner.data.records.base import Conversation, Message
from headway.learner.data.texts.messages import check_turns

from .reader import RowReader, alike, alpaca_prompt, said


def _whole(messages: list[Message], reader: RowReader) -> list[Conversation]:
    """Returns messages of which all assistant turns are trained; the last one is the completion."""
    check_turns(messages, reader.place, ends_with="assistant")
    return [
        Conversation(
            prompt=messages[:-1],
            completion=messages[-1:],
            trained="assistant",
            place=reader.place,
        )
    ]


def chat(reader: RowReader) -> list[Conversation]:
    return _whole(reader.messages("messages"), reader)


def sharegpt(reader: RowReader) -> list[Conversation]:
    return _whole(reader.messages("conversations"), reader)


def alpaca(reader: RowReader) -> list[Conversation]:
    return _whole([*alpaca_prompt(reader), said("assistant", reader.text("output"))], reader)


def prompt_completion(reader: RowReader) -> list[Conversation]:
    return _answered(reader, "prompt", "completion" if "completion" in reader.row else "response")


def _answered(reader: RowReader, asked: str, answer: str) -> list[Conversation]:
    prompt, completion = alike(reader, asked, answer)
    return [Conversation(prompt=prompt, completion=completion, place=reader.place)]


def query_response(reader: RowReader) -> list[Conversation]:
    return _answered(reader, "query", "response")


def text(reader: RowReader) -> list[Conversation]:
    return [Conversation(prompt="", completion=reader.text("text"), trained="all", place=reader.place)]
