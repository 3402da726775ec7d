"""The records of supervised and preference stages, and the account of rows that became none."""

from typing import Any, Literal

from headway.learner.data.messages import Content, Message, RowError, TemplateInputs, shown

__all__ = [
    "Content",
    "Conversation",
    "LabelledCompletion",
    "Message",
    "Preference",
    "Row",
    "RowError",
    "Skipped",
    "Trained",
    "columns_of",
    "shown",
]

Row = dict[str, Any]
Trained = Literal["completion", "assistant", "all"]


class Conversation(TemplateInputs, frozen=True, kw_only=True):
    """A prompt and its completion, which are both text or both messages. Plain text has an empty prompt."""

    prompt: Content
    turns: tuple[tuple[str, str], ...] = ()
    """Of a text alone: turns before the completion, what the model writes and what it reads then. The former is
    trained."""
    completion: Content
    trained: Trained = "completion"
    """The trained part. In messages it is the assistant turns of the completion, those of prompt and completion, or all
    tokens. In a text it is the completion, or with `all` the prompt, too. An assistant turn with `"trained": False` is
    context."""
    place: str = ""
    """The place from which it was read, such as `train.jsonl:12`."""


class Preference(TemplateInputs, frozen=True, kw_only=True):
    """Two completions of one prompt, of which one is better."""

    prompt: Content
    chosen: Content
    rejected: Content
    margin: float = 0.0
    """By how much the chosen one is better, in units of the scores that the file gives; 0 where it gives none."""
    place: str = ""

    @property
    def chosen_conversation(self) -> Conversation:
        """The prompt with the better completion, which alone is trained."""
        return _answered(self, self.chosen)

    @property
    def rejected_conversation(self) -> Conversation:
        """The prompt with the worse completion, which alone is trained."""
        return _answered(self, self.rejected)

    @property
    def conversations(self) -> tuple[Conversation, Conversation]:
        """The better one, and the worse one."""
        return self.chosen_conversation, self.rejected_conversation


class LabelledCompletion(TemplateInputs, frozen=True, kw_only=True):
    """A completion that is desirable or not, without another one to compare it with."""

    prompt: Content
    completion: Content
    label: bool
    """Whether the completion is desirable."""
    place: str = ""

    @property
    def conversation(self) -> Conversation:
        """The prompt with the completion, which alone is trained."""
        return _answered(self, self.completion)


def _answered(record: Preference | LabelledCompletion, completion: Content) -> Conversation:
    return Conversation(
        prompt=record.prompt,
        completion=completion,
        tools=record.tools,
        chat_template_kwargs=record.chat_template_kwargs,
        place=record.place,
    )


class Skipped:
    """The number of rows or records that were left out, by reason, with the first error of each."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.first: dict[str, str] = {}

    def add(self, reason: str, error: str) -> None:
        """Counts one more; `error` says where and why."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.first.setdefault(reason, error)

    @property
    def total(self) -> int:
        """The number of rows that were left out for any reason."""
        return sum(self.counts.values())

    def __str__(self) -> str:
        return "; ".join(f"{count} {reason} (the first is {self.first[reason]})" for reason, count in self._by_count())

    def _by_count(self) -> list[tuple[str, int]]:
        return sorted(self.counts.items(), key=lambda item: -item[1])


def columns_of(row: Row) -> str:
    """Returns the names of a row's columns, for errors."""
    return ", ".join(map(str, row))[:200] or "nothing"
