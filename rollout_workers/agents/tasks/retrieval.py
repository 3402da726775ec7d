"""Questions that a local file answers: the model searches its passages, and writes the answer behind a mark.

The file has one passage a line: text, or JSON with `text` and perhaps `title`. Passages are ranked by BM25 (Robertson
and Zaragoza, 2009). Questions come from any source of prompts whose ground truth is a text, or a list of right texts.
"""

import heapq
import json
import math
import re
import string
from collections import Counter, defaultdict
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headway.broker.errors import ConfigError
from headway.broker.user_code.import_paths import ImportRoots
from headway.rollout_workers.agents.conversation import begin
from headway.rollout_workers.agents.episode import Agent, AgentEpisode, AgentTask, Outcome
from headway.rollout_workers.agents.tools.text_tools import TextTool
from headway.rollout_workers.agents.tools.toolbox import Toolbox, ToolTurns

SATURATION, LENGTH_SHARE = 1.2, 0.75
"""BM25's k1 and b."""
LARGEST_FILE_BYTES = 1 << 28
SHOWN_CHARACTERS = 600
"""The most characters of a passage that the model reads."""
_WORD = re.compile(r"\w+")
_ARTICLES = ("a", "an", "the")


class RetrievalOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The file, and how the model may search it."""

    path: Annotated[str, Meta(min_length=1)]
    """The file of passages, on the workers' machines."""
    passages: Annotated[int, Meta(ge=1, le=100)] = 3
    """The most passages that a search returns."""
    instructions: str = "Search for what you need, then write the answer alone behind `Answer:`."
    """The system message; empty: none."""
    answer_mark: Annotated[str, Meta(min_length=1)] = "Answer:"
    """The answer stands behind the last of these."""
    max_turns: Annotated[int, Meta(ge=1, le=1000)] = 8
    """The most answers of the model."""
    partial_credit: bool = False
    """A wrong answer gets the share of words that it has in common with a right one (F1), in the place of 0."""


class Retrieval(Agent):
    """Reward 1 for a right answer, without regard to case, punctuation and articles; else 0, or `partial_credit`."""

    def __init__(self, options: RetrievalOptions, roots: ImportRoots, where: str) -> None:
        """Raises ConfigError for a file that cannot be read."""
        self._options = options
        self._index = PassageIndex(read_passages(Path(options.path), f"{where}.path"))

    async def rollout(self, episode: AgentEpisode, task: AgentTask) -> Outcome:
        """Play one episode. Raises ValueError for a ground truth that is neither text nor a list of texts."""
        truths = [task.ground_truth] if isinstance(task.ground_truth, str) else task.ground_truth
        if not isinstance(truths, list) or not truths or not all(isinstance(truth, str) for truth in truths):
            raise ValueError(f"task {task.id}: the ground truth {task.ground_truth!r:.80} is no text, nor a list of it")
        messages, toolbox = begin(task.messages, self._options.instructions), Toolbox([self._search()])
        turns = ToolTurns(episode, messages, toolbox, self._options.max_turns)
        reward = self._reward(await turns.answer() or "", truths)
        return {"reward": reward, **toolbox.measures}

    def _search(self) -> TextTool:
        def search(query: str) -> str:
            return self._index.found(query, self._options.passages) or "nothing found"

        return TextTool(search, "Finds the passages that fit some words best.", {"query": "a few words"})

    def _reward(self, text: str, truths: list[str]) -> float:
        _, mark, answer = text.rpartition(self._options.answer_mark)
        shares = [_common_share(_words(answer), _words(truth)) for truth in truths] if mark else [0.0]
        return max(shares) if self._options.partial_credit else float(max(shares) == 1.0)


class PassageIndex:
    """Passages, ranked by BM25."""

    def __init__(self, passages: list[str]) -> None:
        self._passages = passages
        counts = [Counter(_WORD.findall(passage.lower())) for passage in passages]
        self._lengths = [sum(count.values()) for count in counts]
        self._mean = sum(self._lengths) / max(len(passages), 1) or 1.0
        self._places: dict[str, list[tuple[int, int]]] = {}
        for number, count in enumerate(counts):
            for word, times in count.items():
                self._places.setdefault(word, []).append((number, times))

    def found(self, query: str, most: int) -> str:
        """Return the passages that fit best, one a line; "" where none has a word of the query."""
        scores: dict[int, float] = defaultdict(float)
        for word in set(_WORD.findall(query.lower()[:1000])):
            places = self._places.get(word, [])
            rarity = math.log(1 + (len(self._passages) - len(places) + 0.5) / (len(places) + 0.5))
            for number, times in places:
                length = 1 - LENGTH_SHARE + LENGTH_SHARE * self._lengths[number] / self._mean
                scores[number] += rarity * times * (SATURATION + 1) / (times + SATURATION * length)
        best = heapq.nsmallest(most, scores.items(), key=lambda one: (-one[1], one[0]))
        return "\n".join(f"[{place}] {self._passages[number][:SHOWN_CHARACTERS]}" for place, (number, _) in
                         enumerate(best, 1))  # fmt: skip


def read_passages(path: Path, where: str) -> list[str]:
    """Return the passages of a file. Raises ConfigError with the line at fault."""
    try:
        if path.stat().st_size > LARGEST_FILE_BYTES:
            raise ConfigError(f"{where}: {path} has more than {LARGEST_FILE_BYTES >> 20} MiB; split it.")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{where}: {path} cannot be read: {error}") from error
    is_json = path.suffix in (".jsonl", ".json")
    passages = [
        _passage(line, f"{path}:{number}", where) if is_json else line for number, line in enumerate(lines, 1) if line
    ]
    if not passages:
        raise ConfigError(f"{where}: {path} has no passages.")
    return passages


def _passage(line: str, place: str, where: str) -> str:
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: {place} is no JSON: {error}") from error
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise ConfigError(f"{where}: {place} has no `text`; write one JSON object a line.")
    return f"{row['title']}: {row['text']}" if row.get("title") else str(row["text"])


def _words(text: str) -> list[str]:
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return [word for word in bare.split() if word not in _ARTICLES] or text.lower().split()


def _common_share(words: list[str], truth: list[str]) -> float:
    """Return the F1 of two lists of words; 1 only where they are equal."""
    if words == truth:
        return 1.0
    common = sum((Counter(words) & Counter(truth)).values())
    share = 2 * common / max(len(words) + len(truth), 1)
    return min(share, 0.99)  # the same words in another order are no right answer
