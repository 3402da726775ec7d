"""Typed records that supervised and preference stages train on, and readers that know a file by its columns.

    file, saved dataset, hub id ─ files, hubs ─► rows ─ layouts ─► Conversation | Preference | Labelled ─ rendering ─►
    token ids with a loss mask

`open_records` reads all records of one kind into memory, each with the place that it was read from. The invariant: a
broken row is never trained and never lost silently. It ends the reading with an error that names file, line and remedy,
or, with `on_bad_row: skip`, is counted by its reason.
"""

from .base import Conversation, Labelled, Message, Preference, RowError, Skipped
from .opening import RecordOptions, Records, open_records

__all__ = [
    "Conversation",
    "Labelled",
    "Message",
    "Preference",
    "RecordOptions",
    "Records",
    "RowError",
    "Skipped",
    "open_records",
]
