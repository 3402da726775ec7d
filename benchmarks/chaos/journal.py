"""The audit of agents' turns: what the learner trained beside what the agents' own journal has.

Of each trained sample one attempt of its agent must have had exactly the trained turns as answers, and called its tool
once for each call in them, with the receipt that the next turn has read.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from .agent import Answered, Effect, Entry
from .audit import Trained
from .episodes import EpisodeTurn, turn_of

MUST_BE_ZERO = ("unanswered", "unrecorded", "effects_twice", "effects_unlike")
FAILED = "?"
"""What the model reads of a call that failed."""


@dataclass
class Attempt:
    """One run of an agent at a sample."""

    turns: Counter[EpisodeTurn] = field(default_factory=Counter)
    receipts: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """The tool's answers by the arguments of its calls."""


Attempts = Mapping[tuple[str, int], Mapping[str, Attempt]]
"""By group and sample, then by name."""


def read_journal(path: Path) -> Attempts:
    """Return all attempts, without a line that is not whole."""
    found = defaultdict[tuple[str, int], dict[str, Attempt]](dict)
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for line in lines:
        if line.endswith(b"\n"):
            entry: Entry = msgspec.json.decode(line, type=Entry)
            attempt = found[entry.group, entry.sample].setdefault(entry.attempt, Attempt())
            match entry:
                case Answered(read=read, said=said):
                    attempt.turns[turn_of(read, said)] += 1
                case Effect(argument=argument, receipt=receipt):
                    attempt.receipts[argument].append(receipt)
    return found


class TurnAudit(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of MUST_BE_ZERO, and what is reported beside them."""

    unanswered: int = 0
    """Trained turns that the agent of this attempt was not answered."""
    unrecorded: int = 0
    """Answers of the attempt that was trained which are not trained."""
    effects_twice: int = 0
    """Calls of the tool that were trained more than once, or made more than once in the attempt that was trained."""
    effects_unlike: int = 0
    """Trained calls whose answer, as the next turn read it, is not the one that the tool gave in this attempt."""
    turns: int = 0
    """Trained turns."""
    attempts_per_episode: float = 0.0
    most_attempts: int = 0
    tool_calls: int = 0
    """Calls that the tool answered."""
    tool_calls_repeated: int = 0
    """Those that it had answered before, in an earlier attempt that was played again."""


def audit_turns(trained: Iterable[Trained], attempts: Attempts) -> TurnAudit:
    """Compare the trained samples with the journal."""
    counts, arguments = Counter[str](), Counter[str]()
    for one in trained:
        group, _, sample = one.tid.split(":")
        of_sample = list(attempts.get((group, int(sample)), {}).values()) or [Attempt()]
        counts += _differences(one.turns, max(of_sample, key=lambda attempt: _likeness(one.turns, attempt)))
        arguments.update(turn.argument for turn in one.turns if turn.argument)
    counts["effects_twice"] += arguments.total() - len(arguments)
    numbers = [len(of_sample) for of_sample in attempts.values()]
    made = Counter[str]()
    for attempt in (attempt for each in attempts.values() for attempt in each.values()):
        made.update({argument: len(receipts) for argument, receipts in attempt.receipts.items()})
    return TurnAudit(
        **counts,
        attempts_per_episode=round(sum(numbers) / len(numbers), 3) if numbers else 0.0,
        most_attempts=max(numbers, default=0),
        tool_calls=made.total(),
        tool_calls_repeated=made.total() - len(made),
    )


def _likeness(turns: Sequence[EpisodeTurn], attempt: Attempt) -> int:
    both, either = Counter(turns) & attempt.turns, Counter(turns) | attempt.turns
    return both.total() - either.total()


def _differences(turns: Sequence[EpisodeTurn], attempt: Attempt) -> Counter[str]:
    counts = Counter[str](turns=len(turns))
    counts["unanswered"] = (Counter(turns) - attempt.turns).total()
    counts["unrecorded"] = (attempt.turns - Counter(turns)).total()
    for turn in turns:
        if turn.argument:
            receipts = attempt.receipts.get(turn.argument, [])
            counts["effects_twice"] += len(receipts) > 1
            whole, answers = turn.read + turn.said, receipts or [FAILED]
            read = [one.read for one in turns if one.read.startswith(whole)]
            counts["effects_unlike"] += any(not one.removeprefix(whole).startswith(tuple(answers)) for one in read)
    return counts
