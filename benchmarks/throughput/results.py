"""results.jsonl: one line for every case that has ended, well or badly."""

import json
import time
from pathlib import Path
from typing import Any

import msgspec

from . import isolated

LONGEST_WORDS = 300

Line = dict[str, Any]
"""A case's line: {"case": its specification, "seconds": it took, "result" or "error": its end}"""


class Results:
    """A folder's results. The whole specification identifies a case."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / "results.jsonl"

    def measured(self, case: msgspec.Struct, function: str, processes: int, timeout_s: float, **more: str) -> Line:
        """Return the case's line.

        Unless its figures are there already, `function` makes them in processes of its own, from {"case": case,
        **more}. A case that failed before is tried again.
        """
        spec = json.loads(msgspec.json.encode(case))
        known = self._find(spec)
        if known is not None:
            return known
        began = time.monotonic()
        outcome = isolated.run(function, {"case": spec, **more}, processes, timeout_s)
        line = {"case": spec, "seconds": round(time.monotonic() - began, 1), **outcome}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return line

    def _find(self, spec: Any) -> Line | None:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        found: list[Line] = [json.loads(line) for line in lines]
        return next((line for line in found if line["case"] == spec and "result" in line), None)


def last_words(line: Line) -> str:
    """Return the last line of an error; '' where there is none."""
    said = [text for text in line.get("error", "").splitlines() if text.strip()]
    return said[-1][:LONGEST_WORDS] if said else ""
