"""The record of a stage without workers: one line of metrics a step, in a file beside the directory of its model."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from .whole_files import append_line, cut_torn_line, replace_file


class StageLine(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a stage."""

    steps: int
    """The number of steps of the stage so far, this one included."""
    part: str
    """The part of the stage, such as `warm-up 1/2`."""
    loss: float
    pass_rate: float | None = None
    """The pass rate on held-out prompts as it was measured last."""
    metrics: Mapping[str, float] = {}


def record_of(directory: Path) -> Path:
    """Return where a stage that leaves its model in `directory` keeps its record."""
    return directory.with_name(f"{directory.name}.metrics.jsonl")


class StageRecord:
    """Appends the steps of a stage. Steps that a killed stage trains again take the place of the earlier ones."""

    def __init__(self, path: Path, steps: int) -> None:
        """`steps`: the number of steps that the opened stage starts from. Raises HeadwayError."""
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        cut_torn_line(path)
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        kept = [line for line in lines if msgspec.json.decode(line, type=StageLine).steps <= steps]
        if kept != lines:
            replace_file(path, b"".join(kept))

    def write(self, line: StageLine) -> None:
        """Append a step, whole or not at all. Raises HeadwayError."""
        append_line(self._path, msgspec.json.encode(line))
