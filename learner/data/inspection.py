"""Reads a data file as each stage would, and renders some of its records as a model sees them."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headway.broker.errors import ConfigError

from .prompts.files import RowFields, to_items
from .records import Conversation, LabelledCompletion, Preference, RecordOptions, Records, RowError, Skipped
from .records.loading import open_rows, read_records

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .prompts.base import Item
    from .prompts.rendering import Renderer

USES: dict[str, type[Any] | None] = {
    "rl": None,
    "sft": Conversation,
    "preferences": Preference,
    "kto": LabelledCompletion,
}
"""The uses of a file, each with the records that it needs; reinforcement learning takes prompts."""


class BrokenRows(msgspec.Struct, frozen=True, kw_only=True):
    """Rows that cannot be used for one reason."""

    reason: str
    rows: int
    first: str
    """The error of the first one, with its place and the remedy."""


class UseReport(msgspec.Struct, frozen=True, kw_only=True):
    """The file as one use of it reads it."""

    use: str
    layout: str = ""
    """The name of the layout that was told by the columns."""
    rows: int = 0
    records: int = 0
    """0 where the file cannot be used so; `error` then says why."""
    broken: list[BrokenRows] = []
    error: str = ""


class RenderedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One record as the model gets it."""

    place: str
    what: str
    """prompt, conversation, chosen, rejected, desirable or undesirable."""
    tokens: int
    trained_tokens: int
    pieces: list[tuple[str, bool]]
    """Texts end to end, each with whether it is trained."""
    note: str = ""
    """A remark about its tokens, or nothing."""


class Inspection:
    """One file, read for every use."""

    def __init__(self, path: str, options: RecordOptions, fields: RowFields | None = None) -> None:
        """`fields` are the columns of prompts. Raises ConfigError if there is no such file, or if it is no file of
        records at all."""
        self._path, self._fields = path, fields or RowFields()
        self._options = msgspec.structs.replace(options, on_bad_row="skip")
        next(open_rows(path, self._options, "data"), None)  # raises for what is no file of records
        self._found: dict[str, Any] = {}
        self.findings = [self._finding(use, kind) for use, kind in USES.items()]

    def examples(self, tokenizer: "PreTrainedTokenizerBase", renderer: "Renderer", count: int) -> list[RenderedRecord]:
        """Returns the first prompts, and the first records of the first use of records that the file has, rendered.
        Raises ConfigError."""
        prompts = [_prompt(item, tokenizer, renderer) for item in self._found.get("rl", [])[:count]]
        records = next((found for use in ("sft", "preferences", "kto") if (found := self._found.get(use))), ())
        return prompts + [each for record in records[:count] for each in _rendered(record, tokenizer, renderer)]

    def _finding(self, use: str, kind: type[Any] | None) -> UseReport:
        try:
            layout, rows, found, skipped = self._prompts() if kind is None else self._records(kind)
        except ConfigError as error:
            return UseReport(use=use, error=str(error))
        self._found[use] = found
        broken = [
            BrokenRows(reason=reason, rows=count, first=skipped.first[reason])
            for reason, count in skipped.counts.items()
        ]
        return UseReport(use=use, layout=layout, rows=rows, records=len(found), broken=broken)

    def _records(self, kind: type[Any]) -> tuple[str, int, Any, Skipped]:
        records: Records[Any] = read_records(kind, self._path, msgspec.to_builtins(self._options), "data")
        return records.layout, records.rows, records, records.skipped

    def _prompts(self) -> tuple[str, int, list["Item"], Skipped]:
        kind = _kind_of_prompts(self._path)
        items, skipped, rows = [], Skipped(), 0
        for place, row in open_rows(self._path, self._options, "data"):
            rows += 1
            try:
                if isinstance(row, RowError):
                    raise row
                items += to_items([(place, row)], self._fields, Path(self._path).stem)
            except ConfigError as error:
                skipped.add(getattr(error, "reason", "no prompt with a ground truth"), str(error))
        if not items:
            raise ConfigError(
                f"no row is a prompt with a ground truth: {next(iter(skipped.first.values()), 'no rows')}"
            )
        return kind, rows, items, skipped


def _kind_of_prompts(path: str) -> str:
    """Returns the kind in `prompts.kind` that reads the file. Raises ConfigError if there is none."""
    if Path(path).is_file():
        with Path(path).open("rb") as opened:
            start = opened.read(64).lstrip()
        if start.startswith(b"PAR1"):
            return "parquet"
        if start.removeprefix(b"\xef\xbb\xbf").startswith(b"{"):
            return "jsonl"
    raise ConfigError("prompts are read from JSON lines and Parquet, and this is neither. Write it as one of them.")


def _rendered(record: Any, tokenizer: "PreTrainedTokenizerBase", renderer: "Renderer") -> Iterator[RenderedRecord]:
    if isinstance(record, Preference):
        sides = {"chosen": record.chosen_conversation, "rejected": record.rejected_conversation}
    elif isinstance(record, LabelledCompletion):
        sides = {"desirable" if record.label else "undesirable": record.conversation}
    else:
        sides = {"conversation": record}
    for what, conversation in sides.items():
        yield _example(what, conversation, tokenizer, renderer)


def _example(
    what: str, conversation: Conversation, tokenizer: "PreTrainedTokenizerBase", renderer: "Renderer"
) -> RenderedRecord:
    from .records.conversation_renderer import ConversationRenderer

    conversations = ConversationRenderer(tokenizer, renderer)
    rendered = conversations.render(conversation)
    if rendered is None:
        return RenderedRecord(place=conversation.place, what=what, tokens=0, trained_tokens=0, pieces=[])
    tokens = zip(rendered.loss_mask.tolist(), rendered.token_ids.tolist(), strict=True)
    pieces = [
        (_decoded(tokenizer, [token for _, token in run]), bool(bit))
        for bit, run in groupby(tokens, lambda pair: pair[0])
    ]
    return RenderedRecord(
        place=conversation.place,
        what=what,
        tokens=len(rendered.token_ids),
        trained_tokens=int(rendered.loss_mask.sum()),
        pieces=pieces,
        note=next(iter(conversations.split.first.values()), ""),
    )


def _prompt(item: "Item", tokenizer: "PreTrainedTokenizerBase", renderer: "Renderer") -> RenderedRecord:
    prompt = renderer.prompt(item, group="example", num_samples=1)
    return RenderedRecord(
        place=item.place,
        what="prompt",
        tokens=len(prompt.token_ids),
        trained_tokens=0,
        pieces=[(_decoded(tokenizer, prompt.token_ids), False)],
    )


def _decoded(tokenizer: "PreTrainedTokenizerBase", token_ids: list[int]) -> str:
    return str(tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))
