"""The layouts of files: which columns each has, and how one row of it becomes records.

    row ─► RowReader: prompts, completions, numbers ─► the layout's function ─► records

`loading.py` chooses a layout by the columns of the first rows, or by the name in a recipe. One row may give several
records: a list with scores gives all its pairs.

The invariant: a row becomes whole records, or a RowError that says what it lacks.
"""

import math
from collections.abc import Callable
from itertools import combinations
from typing import Any, NamedTuple

from headway.learner.data.messages import OPENING, Tags, check_turns, read_content, to_messages

from .record_types import (
    Content,
    Conversation,
    LabelledCompletion,
    Message,
    Preference,
    Row,
    RowError,
    columns_of,
    shown,
)


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
        messages += to_messages(
            [message_of("user", question), message_of("assistant", answer)], reader.place, "history", Tags()
        )
    return [*messages, message_of("user", "\n".join(text for text in asked if text))]


def message_of(role: str, content: Any) -> Message:
    """Returns one message."""
    return {"role": role, "content": content}


def alike(reader: RowReader, *columns: str) -> list[Content]:
    """Returns a prompt and its completions: all texts, or all messages. A text that stands among messages is one of
    them."""
    values = [reader.content(column) for column in columns]
    if all(isinstance(value, str) for value in values):
        return values
    prompt, *completions = (
        value if isinstance(value, list) else [message_of("assistant" if number else "user", value)]
        for number, value in enumerate(values)
    )
    check_turns(prompt, reader.place, ends_with="prompt")
    for completion in completions:
        check_turns([*prompt, *completion], reader.place, ends_with="assistant")
    return [prompt, *completions]


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
    return _whole([*alpaca_prompt(reader), message_of("assistant", reader.text("output"))], reader)


def prompt_completion(reader: RowReader) -> list[Conversation]:
    return _answered(reader, "prompt", "completion" if "completion" in reader.row else "response")


def _answered(reader: RowReader, asked: str, answer: str) -> list[Conversation]:
    prompt, completion = alike(reader, asked, answer)
    return [Conversation(prompt=prompt, completion=completion, place=reader.place)]


def query_response(reader: RowReader) -> list[Conversation]:
    return _answered(reader, "query", "response")


def text(reader: RowReader) -> list[Conversation]:
    return [Conversation(prompt="", completion=reader.text("text"), trained="all", place=reader.place)]


def preference(reader: RowReader) -> list[Preference]:
    chosen, rejected = reader.content("chosen"), reader.content("rejected")
    if isinstance(chosen, list) and isinstance(rejected, list) and _begin_with_prompt(reader, chosen, rejected):
        return _pair(_without_prompt(reader, chosen, rejected), reader)
    if "prompt" not in reader.row:
        raise reader.error(
            "without a prompt",
            f"there is no 'prompt', and 'chosen' and 'rejected' are texts (the row has {columns_of(reader.row)})",
            "Add a column 'prompt', or write whole conversations as lists of messages.",
        )
    return _pair(alike(reader, "prompt", "chosen", "rejected"), reader)


def _begin_with_prompt(reader: RowReader, *conversations: list[Message]) -> bool:
    """Returns whether conversations begin with the prompt, which a column may state, too."""
    prompt = reader.content("prompt") if "prompt" in reader.row else ""
    if isinstance(prompt, str):
        return not prompt or all(each[0]["role"] in (*OPENING, "user") for each in conversations)
    has_system = prompt[0]["role"] in OPENING
    bare = [each[1:] if each[0]["role"] in OPENING and not has_system else each for each in conversations]
    return all(each[: len(prompt)] == prompt for each in bare)


def _without_prompt(reader: RowReader, chosen: list[Message], rejected: list[Message]) -> list[Content]:
    """Returns the prompt and both completions of conversations that may begin with it."""
    common = next((n for n, pair in enumerate(zip(chosen, rejected, strict=False)) if pair[0] != pair[1]), None)
    common = min(len(chosen), len(rejected)) if common is None else common
    prompt, first, second = chosen[:common], chosen[common:], rejected[common:]
    if not first and not second:
        raise _no_difference(reader)
    if not first or not second or not prompt or any(turn["role"] != "assistant" for turn in (first[0], second[0])):
        raise reader.error(
            "without a common prompt",
            f"'chosen' and 'rejected' have their first {common} messages in common, and an assistant's turn does not"
            " follow in both",
            "Both must answer the same prompt: give it in a column 'prompt', or as the same first messages of both.",
        )
    for completion in (first, second):
        check_turns([*prompt, *completion], reader.place, ends_with="assistant")
    return [prompt, first, second]


def _pair(contents: list[Content], reader: RowReader) -> list[Preference]:
    prompt, chosen, rejected = contents
    if chosen == rejected:
        raise _no_difference(reader)
    return [
        Preference(
            prompt=prompt,
            chosen=chosen,
            rejected=rejected,
            margin=_margin(reader),
            place=reader.place,
        )
    ]


def _no_difference(reader: RowReader) -> RowError:
    return reader.error(
        "whose completions do not differ",
        "the chosen completion equals the rejected one, so there is nothing to prefer",
        "Leave the record out.",
    )


def _margin(reader: RowReader) -> float:
    """Returns `margin`, or the gap between the columns `score_chosen` and `score_rejected`; 0 without them."""
    if "margin" in reader.row:
        return reader.number(reader.row["margin"], "margin")
    if "score_chosen" in reader.row and "score_rejected" in reader.row:
        better, worse = (reader.number(reader.row[name], name) for name in ("score_chosen", "score_rejected"))
        return better - worse
    return 0.0


def conversations_preference(reader: RowReader) -> list[Preference]:
    return _after(reader.messages("conversations"), reader)


def alpaca_preference(reader: RowReader) -> list[Preference]:
    return _after(alpaca_prompt(reader), reader)


def _after(prompt: list[Message], reader: RowReader) -> list[Preference]:
    """Returns the pair of columns `chosen` and `rejected` after a prompt."""
    check_turns(prompt, reader.place, ends_with="prompt")
    answers = [reader.content(column) for column in ("chosen", "rejected")]
    first, second = (answer if isinstance(answer, list) else [message_of("assistant", answer)] for answer in answers)
    for completion in (first, second):
        check_turns([*prompt, *completion], reader.place, ends_with="assistant")
    return _pair([prompt, first, second], reader)


def message_pair(reader: RowReader) -> list[Preference]:
    chosen, rejected = reader.messages("chosen_messages"), reader.messages("rejected_messages")
    return _pair(_without_prompt(reader, chosen, rejected), reader)


def ranked(reader: RowReader) -> list[Preference]:
    """Returns all pairs of a list that has the best response first."""
    prompt = _prompt_of_list(reader)
    answers = _answers(reader, "responses")
    return [
        Preference(
            prompt=prompt,
            chosen=_answer(prompt, better),
            rejected=_answer(prompt, worse),
            place=reader.place,
        )
        for better, worse in combinations(answers, 2)
        if better != worse
    ] or _nothing_to_prefer(reader)


def scored(reader: RowReader) -> list[Preference]:
    """Returns all pairs of responses with different scores, each with the gap as its margin."""
    name = "response" if "response" in reader.row else "responses"
    scores_name = next(column for column in ("score", "scores", "rewards") if column in reader.row)
    prompt, answers, stated = _prompt_of_list(reader), _answers(reader, name), reader.row[scores_name]
    if not isinstance(stated, list) or len(stated) != len(answers):
        count = len(stated) if isinstance(stated, list) else shown(stated)
        raise reader.error(
            "with unequal numbers of responses and scores",
            f"{name!r} has {len(answers)} items, and {scores_name!r} has {count}",
            "Write one score for each response.",
        )
    scores = [reader.number(score, scores_name) for score in stated]
    ranked = sorted(zip(scores, answers, strict=True), key=lambda pair: -pair[0])
    return [
        Preference(
            prompt=prompt,
            chosen=_answer(prompt, better),
            rejected=_answer(prompt, worse),
            margin=high - low,
            place=reader.place,
        )
        for (high, better), (low, worse) in combinations(ranked, 2)
        if high > low and better != worse
    ] or _nothing_to_prefer(reader)


def _prompt_of_list(reader: RowReader) -> Content:
    if "instruction" in reader.row:
        return alpaca_prompt(reader)
    return reader.content("query" if "query" in reader.row else "prompt")


def _answers(reader: RowReader, column: str) -> list[str]:
    values = reader.row[column]
    if not isinstance(values, list) or len(values) < 2:
        raise reader.error(
            "with fewer than two responses",
            f"{column!r} is {shown(values)}",
            "A preference needs a list of at least two responses.",
        )
    for value in values:
        if not isinstance(value, str) or not value.strip():
            raise reader.error(
                "with an empty response", f"{column!r} has the item {shown(value)}", "Write a text, or leave it out."
            )
    return values


def _answer(prompt: Content, text: str) -> Content:
    return text if isinstance(prompt, str) else [message_of("assistant", text)]


def _nothing_to_prefer(reader: RowReader) -> list[Preference]:
    raise reader.error(
        "whose responses are equally good",
        "no two responses differ in text and score, so there is nothing to prefer",
        "Leave the record out.",
    )


def unpaired(reader: RowReader) -> list[LabelledCompletion]:
    label = reader.label()
    if "prompt" not in reader.row:  # the prompt may be the first messages of the completion
        messages = reader.messages("completion")
        return _last(messages, label, reader)
    prompt, completion = alike(reader, "prompt", "completion")
    return [LabelledCompletion(prompt=prompt, completion=completion, label=label, place=reader.place)]


def labelled_chat(reader: RowReader) -> list[LabelledCompletion]:
    return _last(reader.messages("messages"), reader.label(), reader)


def labelled_sharegpt(reader: RowReader) -> list[LabelledCompletion]:
    return _last(reader.messages("conversations"), reader.label(), reader)


def labelled_alpaca(reader: RowReader) -> list[LabelledCompletion]:
    return _last([*alpaca_prompt(reader), message_of("assistant", reader.text("output"))], reader.label(), reader)


def _last(messages: list[Message], label: bool, reader: RowReader) -> list[LabelledCompletion]:
    """Returns a conversation whose last turn is labelled."""
    check_turns(messages, reader.place, ends_with="assistant")
    return [
        LabelledCompletion(
            prompt=messages[:-1],
            completion=messages[-1:],
            label=label,
            place=reader.place,
        )
    ]


Record = Conversation | Preference | LabelledCompletion
Read = Callable[[RowReader], list[Any]]


class Layout(NamedTuple):
    """One way in which files hold records."""

    name: str
    needs: tuple[str, ...]
    """The columns by which it is known. `a|b` is either."""
    read: Read

    def lacks(self, row: Row) -> list[str]:
        """Returns the needed columns that a row has not."""
        return [need for need in self.needs if not any(row.get(name) is not None for name in need.split("|"))]


LAYOUTS: dict[type[Any], tuple[Layout, ...]] = {
    Conversation: (
        Layout("messages", ("messages",), chat),
        Layout("sharegpt", ("conversations",), sharegpt),
        Layout("prompt_completion", ("prompt", "completion|response"), prompt_completion),
        Layout("query_response", ("query", "response"), query_response),
        Layout("alpaca", ("instruction|input", "output"), alpaca),
        Layout("text", ("text",), text),
    ),
    Preference: (
        Layout("scored", ("query|prompt|instruction", "response|responses", "score|scores|rewards"), scored),
        Layout("ranked", ("query|prompt|instruction", "responses"), ranked),
        Layout("sharegpt_preference", ("conversations", "chosen", "rejected"), conversations_preference),
        Layout("alpaca_preference", ("instruction|input", "chosen", "rejected"), alpaca_preference),
        Layout("message_pair", ("chosen_messages", "rejected_messages"), message_pair),
        Layout("preference", ("chosen", "rejected"), preference),
    ),
    LabelledCompletion: (
        Layout("unpaired", ("completion", "label"), unpaired),
        Layout("messages_labelled", ("messages", "label|kto_tag"), labelled_chat),
        Layout("sharegpt_labelled", ("conversations", "label|kto_tag"), labelled_sharegpt),
        Layout("alpaca_labelled", ("instruction|input", "output", "label|kto_tag"), labelled_alpaca),
    ),
}
"""All layouts of each kind of record. Where a file fits several, the first one counts."""
RECORD_NAMES: dict[type[Any], str] = {
    Conversation: "conversations",
    Preference: "preferences",
    LabelledCompletion: "labelled completions",
}


def is_layout_of(layout: Layout, kind: type[Any], row: Row) -> bool:
    """Returns whether a row looks like the layout. Conversations with a label, or with two answers, are of other
    kinds."""
    if layout.lacks(row):
        return False
    return kind is not Conversation or not (
        {"chosen", "rejected"} <= row.keys() or isinstance(row.get("label", row.get("kto_tag")), bool)
    )


def is_prompt_of_rl(row: Row) -> bool:
    """Returns whether a row has the columns of a prompt of reinforcement learning, and no completion."""
    return (
        "prompt" in row
        and ("ground_truth" in row or "reward_model" in row)
        and not {"completion", "response"} & row.keys()
    )
