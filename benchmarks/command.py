"""The parts that the command lines of all benchmarks share."""

import argparse
import json
import signal
import sys
from typing import Any


def parser(page: str | None, name: str) -> argparse.ArgumentParser:
    """Return a parser whose help is the module's own page, of `python -m benchmarks.NAME`."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=page, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def names(text: str) -> list[str]:
    """Parse names with commas between them; '' is none."""
    return text.split(",") if text else []


def numbers(text: str) -> list[int]:
    """Parse numbers with commas between them."""
    return [int(number) for number in text.split(",")]


def tell(words: str) -> None:
    """Print progress, to standard error."""
    print(words, file=sys.stderr, flush=True)


def finish(result: dict[str, Any], failed: object = None) -> int:
    """Print the last line, and return the exit code: 1 if something failed."""
    print(json.dumps(result))
    return int(bool(failed))


def end_children_at_sigterm() -> None:
    """Make a request to end raise SystemExit, so that whatever runs is ended, as at Ctrl-C."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
