"""The process behind the math_verify reward: [ground truth, response] in, true, false or an error out."""

import logging
import signal
import sys

import msgspec

ABANDONED_S = 60
"""A comparison that outlives its worker ends the process: the alarm's default action, even in C code."""


def main() -> None:
    """Says `true` once it is ready, then answers line by line until its input ends."""
    logging.disable(logging.WARNING)
    from math_verify import parse, verify

    del parse, verify
    _say(True)
    for line in sys.stdin.buffer:
        signal.alarm(ABANDONED_S)
        ground_truth, response = msgspec.json.decode(line, type=tuple[str, str])
        _say(is_right(ground_truth, response))
        signal.alarm(0)


def is_right(ground_truth: str, response: str) -> bool | str:
    """Whether the last boxed answer equals `ground_truth`; a string says why that cannot be told."""
    from math_verify import LatexExtractionConfig, parse, verify

    gold = parse(_boxed(ground_truth), parsing_timeout=None)
    if not gold:
        return f"the ground truth {ground_truth!r} is no mathematical expression"
    start = response.rfind("\\boxed")
    answer = parse(response[start:], [LatexExtractionConfig()], parsing_timeout=None) if start >= 0 else []
    return bool(answer) and verify(gold, answer, timeout_seconds=None)


def _boxed(ground_truth: str) -> str:
    return ground_truth if "\\boxed" in ground_truth or "$" in ground_truth else f"\\boxed{{{ground_truth}}}"


def _say(answer: bool | str) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
