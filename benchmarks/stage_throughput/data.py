"""The files that every case reads: random characters, with a long tail of lengths."""

import json
import random
from pathlib import Path

from benchmarks.throughput.checkpoint import ALPHABET
from benchmarks.throughput.workload import LONGEST_PROMPT, long_tailed_lengths

from .order import Task


def write(path: Path, task: Task, count: int, median: int, longest: int) -> float:
    """Write `count` records of one token a character. Returns their mean number of tokens, end of text included."""
    draw = random.Random(0)
    lengths = long_tailed_lengths(count, median, longest - 1)
    records = [_record(draw, task, length) for length in lengths]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return sum(_tokens(record) for record in records) / count


def _record(draw: random.Random, task: Task, length: int) -> dict[str, str]:
    """Return a pair whose rejected response is between half as long and as long as its chosen one."""
    prompt_length = min(LONGEST_PROMPT, length // 4)
    response_length = length - prompt_length
    prompt, response = _text(draw, prompt_length), _text(draw, response_length)
    if task == "sft":
        return {"prompt": prompt, "completion": response}
    return {"prompt": prompt, "chosen": response, "rejected": _text(draw, draw.randint(-(-length // 3), length // 2))}


def _tokens(record: dict[str, str]) -> int:
    responses = [text for name, text in record.items() if name != "prompt"]
    return sum(len(record["prompt"]) + len(response) + 1 for response in responses)


def _text(draw: random.Random, length: int) -> str:
    letters = ALPHABET.replace(" ", "")
    return "".join(draw.choices(letters, k=length))
