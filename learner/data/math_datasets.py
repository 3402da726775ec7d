"""GSM8K and MATH as their authors publish them become prompts for reinforcement learning.

Both prompts are those of verl's examples (data_preprocess/gsm8k.py and math_dataset.py): the question, a space, and an
instruction. The answer behind `####` is for a reward of one's own; `math_verify` reads the last box.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headway.broker.errors import ConfigError

from .records import RowError, Skipped
from .records.record_types import Row, columns_of, shown
from .records.sources import PlacedRow, read_file, read_hugging_face, read_modelscope

INSTRUCTIONS = {
    "boxed": "Let's think step by step and output the final answer within \\boxed{}.",
    "hashes": 'Let\'s think step by step and output the final answer after "####".',
}
LONGEST_ROW_BYTES = 8_000_000
_HASHES = re.compile(r"####\s*([-+]?[\d.,]*\d)\s*\.?\s*$")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|\s(\S))")


class MathSet(NamedTuple):
    """One published set."""

    data_source: str
    """Its name as verl's examples have it."""
    question: str
    """The column of the question."""
    solution: str
    """The column of the worked solution."""
    answer: Callable[[str], str | None]
    """Returns the final answer in a solution; None if there is none."""
    form: str
    """The place of an answer, for errors."""
    subset: str | None
    """The subset on a hub."""


def after_hashes(solution: str) -> str | None:
    """Returns the number behind the last `####`, without commas: `1,234` is 1234."""
    found = _HASHES.search(solution)
    return found[1].replace(",", "") if found else None


def last_boxed(solution: str) -> str | None:
    """Returns what the last `\\boxed{...}` or `\\fbox{...}` holds, up to the brace that closes it, or the single sign
    of `\\boxed 5`. None without one, or if it is not closed."""
    boxes = list(_BOX.finditer(solution))
    if not boxes:
        return None
    last = boxes[-1]
    if last[1]:
        return last[1].rstrip("$.,")
    depth = 1
    for position in range(last.end(), len(solution)):
        if solution[position - 1] != "\\":  # an escaped brace is a sign of the formula
            depth += {"{": 1, "}": -1}.get(solution[position], 0)
        if not depth:
            return solution[last.end() : position].strip() or None
    return None


SETS = {
    "gsm8k": MathSet("openai/gsm8k", "question", "answer", after_hashes, "`#### 42` at its end", "main"),
    "math": MathSet("DigitalLearningGmbH/MATH-lighteval", "problem", "solution", last_boxed, "`\\boxed{42}`", None),
}


class PromptRows(NamedTuple):
    """The prompts of a set."""

    rows: list[Row]
    skipped: Skipped


def prepare(
    name: str,
    source: str,
    *,
    instruction: str,
    as_text: bool,
    on_bad_row: str,
    subset: str | None = None,
    split: str = "train",
) -> PromptRows:
    """Returns a set's rows with prompt, ground_truth, data_source and extra_info.

    `source` is a file, or a directory of JSON and Parquet files, such as MATH's with a file for each problem, or
    `hf:OWNER/NAME` or `modelscope:OWNER/NAME`, of which this subset (None: the set's own) and split are read. Raises
    ConfigError for what cannot be read, and RowError for a row without a question or an answer, unless `on_bad_row` is
    `skip`.
    """
    rows: list[Row] = []
    skipped = Skipped()
    for place, row in _rows(source, subset or SETS[name].subset, split):
        try:
            rows.append(_prompt(SETS[name], place, row, len(rows), INSTRUCTIONS[instruction], as_text))
        except RowError as error:
            if on_bad_row != "skip":
                raise
            skipped.add(error.reason, str(error))
    if not rows:
        raise ConfigError(f"--from: {source} has no row of {name}. {skipped}")
    return PromptRows(rows, skipped)


def write_rows(rows: list[Row], out: Path) -> None:
    """Writes rows as JSON lines or, where the name ends with .parquet, as Parquet. Raises ConfigError."""
    if out.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"--out: {out} must end with .jsonl or .parquet.")
    try:
        if out.suffix == ".parquet":
            import pyarrow
            from pyarrow import parquet

            parquet.write_table(pyarrow.Table.from_pylist(rows), out)
        else:
            out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out: {out} cannot be written: {error.strerror or error}.") from error


def _prompt(chosen: MathSet, place: str, row: Row | RowError, index: int, instruction: str, as_text: bool) -> Row:
    if isinstance(row, RowError):
        raise row
    question, solution = (_text(row, column, place) for column in (chosen.question, chosen.solution))
    truth = chosen.answer(solution)
    if truth is None:
        raise RowError(
            place,
            "without an answer",
            f"{chosen.solution!r} has no {chosen.form}, but ends with {shown(solution[-60:])}",
            "Correct it, or leave such rows out with --skip-broken.",
        )
    asked = f"{question.strip()} {instruction}"
    return {
        "prompt": asked if as_text else [{"role": "user", "content": asked}],
        "ground_truth": truth,
        "data_source": chosen.data_source,
        "extra_info": {"index": index, **_told(row)},
    }


def _told(row: Mapping[str, Any]) -> Row:
    return {name: value for name, value in row.items() if isinstance(value, str | int | float)}


def _text(row: Row, column: str, place: str) -> str:
    value = row.get(column)
    if not isinstance(value, str) or not value.strip():
        raise RowError(
            place,
            f"without {column!r}",
            f"{column!r} is {shown(value)}; the row has {columns_of(row)}",
            "Is this file one of the published set?",
        )
    return value


def _rows(source: str, subset: str | None, split: str) -> Iterator[PlacedRow]:
    hub, _, name = source.partition(":")
    match hub:
        case "hf":
            return read_hugging_face(name, subset, split, "--from")
        case "modelscope":
            return read_modelscope(name, subset, split, "--from")
    return _rows_below(Path(source))


def _rows_below(source: Path) -> Iterator[PlacedRow]:
    if not source.exists():
        raise ConfigError(
            f"--from: there is no {source}. Give a file of the set, its directory, or hf:OWNER/NAME or"
            " modelscope:OWNER/NAME for a set on a hub."
        )
    if source.is_file():
        yield from _rows_of(source)
        return
    files = sorted(file for file in source.rglob("*") if file.suffix in (".json", ".jsonl", ".parquet", ".arrow"))
    if not files:
        raise ConfigError(f"--from: {source} has no JSON, Parquet or Arrow files below it.")
    for file in files:
        yield from _rows_of(file)


def _rows_of(file: Path) -> Iterator[PlacedRow]:
    """Yields the rows of a file, or the one object of a file that is all of it."""
    if file.suffix == ".json":
        try:
            content = json.loads(file.read_bytes())
        except (ValueError, RecursionError, OSError):
            content = None  # the reader of files says what is wrong
        if isinstance(content, dict):
            yield str(file), content
            return
    yield from read_file(file, LONGEST_ROW_BYTES, "--from")
