"""Whether a warm-up's directory is complete: its outcome is written last."""

from pathlib import Path
from typing import Any

import msgspec

OUTCOME = "sft.json"


def is_complete(directory: Path) -> bool:
    """True once `mark_complete` has been called."""
    return (directory / OUTCOME).exists()


def mark_complete(directory: Path, outcome: Any) -> None:
    """Write the outcome, whole or not at all, after the model is on disk."""
    part = directory / f"{OUTCOME}.part"
    part.write_bytes(msgspec.json.format(msgspec.json.encode(outcome)) + b"\n")
    part.replace(directory / OUTCOME)
