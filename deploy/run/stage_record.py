"""The record of a stage without workers: one StageEvent a step, in a file beside the directory of its model."""

import secrets
from pathlib import Path

import msgspec

from .events import StageEvent
from .stage_output import SFT, STAGES
from .whole_files import append_line, cut_torn_line, replace_file

ENDING = ".metrics.jsonl"


def record_of(directory: Path) -> Path:
    """Return where a stage that leaves its model in `directory` keeps its record."""
    return directory.with_name(f"{directory.name}{ENDING}")


def records_in(run: Path) -> dict[str, Path]:
    """Return the records of the run's stages, by the names of the directories that the stages leave, in order."""
    numbered = sorted((run / STAGES).glob(f"[0-9]*{ENDING}"), key=lambda path: int(path.name.partition("-")[0]))
    found = [record_of(run / SFT), *numbered]
    return {path.name.removesuffix(ENDING): path for path in found if path.is_file()}


def tracker_identity(directory: Path, made_from: str) -> str:
    """Return 16 hexadecimal digits for trackers, the same for each process of one stage. A stage of another recipe in
    its place gets others; `made_from` tells them apart. Raises HeadwayError."""
    path = directory.with_name(f".{directory.name}.identity")
    known = path.read_text().split() if path.is_file() else []
    if len(known) != 2 or known[0] != made_from:
        known = [made_from, secrets.token_hex(8)]
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, f"{' '.join(known)}\n".encode())
    return known[1]


class StageRecord:
    """Appends the steps of a stage. Steps that a killed stage trains again take the place of the earlier ones."""

    def __init__(self, path: Path, steps: int) -> None:
        """`steps`: the number of steps that the opened stage starts from. Raises HeadwayError."""
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        cut_torn_line(path)
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        kept = [line for line in lines if msgspec.json.decode(line, type=StageEvent).steps <= steps]
        if kept != lines:
            replace_file(path, b"".join(kept))

    def write(self, line: StageEvent) -> None:
        """Append a step, whole or not at all. Raises HeadwayError."""
        append_line(self._path, msgspec.json.encode(line))
