"""Typed records that supervised and preference stages train on, and readers that know a file by its columns.

    file, saved dataset, hub id ─ sources ─► rows ─ layouts ─► Conversation | Preference | LabelledCompletion
    ─ conversation_renderer ─► token ids with a loss mask

`open_records` reads all records of one kind into memory, each with the place that it was read from. The invariant: a
broken row is never trained and never lost silently. It ends the reading with an error that names file, line and remedy,
or, with `on_bad_row: skip`, is counted by its reason.
"""

from .loading import RecordOptions, Records, open_records
from .record_types import Conversation, LabelledCompletion, Message, Preference, RowError, Skipped

__all__ = [
    "Conversation",
    "LabelledCompletion",
    "Message",
    "Preference",
    "RecordOptions",
    "Records",
    "RowError",
    "Skipped",
    "open_records",
]
