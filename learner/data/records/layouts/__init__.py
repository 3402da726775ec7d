"""The layouts of files: which columns each has, and how one row of it becomes records.

    row ─► reader.py: prompts, completions, numbers ─► conversations.py, preferences.py, labelled.py ─► records

`opening.py` chooses a layout by the columns of the first rows, or by the name in a recipe. One row may give several
records: a list with scores gives all its pairs.

The invariant: a row becomes whole records, or a RowError that says what it lacks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from headway.learner.data.records.base import Conversation, Labelled, Preference, Row

from . import conversations, labelled, preferences
from .reader import RowReader

__all__ = ["CALLED", "LAYOUTS", "Layout", "Record", "RowReader", "is_layout_of", "is_prompt_of_rl"]

Record = Conversation | Preference | Labelled
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
        Layout("messages", ("messages",), conversations.chat),
        Layout("sharegpt", ("conversations",), conversations.sharegpt),
        Layout("prompt_completion", ("prompt", "completion|response"), conversations.prompt_completion),
        Layout("query_response", ("query", "response"), conversations.query_response),
        Layout("alpaca", ("instruction|input", "output"), conversations.alpaca),
        Layout("text", ("text",), conversations.text),
    ),
    Preference: (
        Layout(
            "scored", ("query|prompt|instruction", "response|responses", "score|scores|rewards"), preferences.scored
        ),
        Layout("ranked", ("query|prompt|instruction", "responses"), preferences.ranked),
        Layout("sharegpt_preference", ("conversations", "chosen", "rejected"), preferences.conversations_preference),
        Layout("alpaca_preference", ("instruction|input", "chosen", "rejected"), preferences.alpaca_preference),
        Layout("message_pair", ("chosen_messages", "rejected_messages"), preferences.message_pair),
        Layout("preference", ("chosen", "rejected"), preferences.preference),
    ),
    Labelled: (
        Layout("unpaired", ("completion", "label"), labelled.unpaired),
        Layout("messages_labelled", ("messages", "label|kto_tag"), labelled.labelled_chat),
        Layout("sharegpt_labelled", ("conversations", "label|kto_tag"), labelled.labelled_sharegpt),
        Layout("alpaca_labelled", ("instruction|input", "output", "label|kto_tag"), labelled.labelled_alpaca),
    ),
}
"""All layouts of each kind of record. Where a file fits several, the first one counts."""
CALLED: dict[type[Any], str] = {
    Conversation: "conversations",
    Preference: "preferences",
    Labelled: "labelled completions",
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
