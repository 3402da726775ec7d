"""Conversations as token ids with a loss mask, exact to the token.

    messages ─ chat template ─► text ─ where each trained turn begins and ends ─► tokens, mask

A template that marks its turns ({% generation %}) says where they are. For another one, a turn begins where the prompt
before it ends, and ends where the conversation up to it ends: this holds only if each of these texts is the beginning
of the next, which is checked. A trained turn ends with the stop token, since a model samples nothing after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from headway.broker.errors import ConfigError
from headway.learner.data.messages import TemplateInputs
from headway.learner.data.prompts.rendering import Renderer
from headway.learner.data.tokenization import Ends, Span, refuse_for_text

from .record_types import Conversation, Message, Skipped

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase

_MARK_IT = (
    "Put {% generation %} and {% endgeneration %} around what the assistant says in the template, as the templates do"
    " that TRL trains with."
)


class LengthLimit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fate of conversations that are too long."""

    max_tokens: Annotated[int, Meta(ge=0, description="tokens of the longest conversation; 0: no limit")] = 0
    too_long: Annotated[
        Literal["refuse", "drop", "cut_end", "cut_prompt"],
        Meta(
            description="a longer one is an error, is left out, loses its last tokens, or the first ones of its prompt"
            " (and then its last ones if the prompt was too short)"
        ),
    ] = "refuse"


@dataclass(frozen=True, kw_only=True, eq=False)
class Rendered:
    """A conversation of L tokens."""

    token_ids: NDArray[np.int32]
    """[L]"""
    loss_mask: NDArray[np.uint8]
    """[L] 1 where the token is trained. The first token never is, because nothing predicts it."""

    @property
    def prompt_length(self) -> int:
        """The number of tokens before the first trained one."""
        return int(self.loss_mask.argmax())


class ConversationRenderer:
    """Renders conversations for one model, and counts those that were left out or cut in `skipped` and `cut`."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", renderer: Renderer, limit: LengthLimit | None = None
    ) -> None:
        self._tokenizer, self._renderer = tokenizer, renderer
        self._template, self._texts, self._ends = renderer.template, renderer.texts, Ends(tokenizer)
        self._limit = limit or LengthLimit()
        self.skipped = Skipped()
        """The conversations of which nothing is trained."""
        self.cut = Skipped()
        """The conversations that lost tokens."""
        self.split = Skipped()
        """The conversations whose tokens are not those of the whole text, as one of these would lie across the border
        of a prompt and what is trained."""

    def render(self, conversation: Conversation) -> Rendered | None:
        """Returns the tokens, with those of a prompt as `Renderer` has them; None for a conversation that is left out.

        Raises ConfigError, with the record's place, for one that is too long where the limit refuses it, and where the
        chat template does not tell which tokens are trained.
        """
        (rendered,) = self.render_together([conversation])
        return rendered

    def render_together(self, conversations: Sequence[Conversation]) -> list[Rendered | None]:
        """Returns what `render` does of conversations with one prompt, such as those of a pair: where one has to lose
        tokens of its prompt, all lose the same ones. Where two have the same tokens, all are left out: they differ only
        in what was cut off, or in what the chat template does not write."""
        encoded = [self._encode(conversation) for conversation in conversations]
        kept = [self._kept_prompt(token_ids, mask) for token_ids, mask, _ in encoded]
        keep = min((length for length in kept if length is not None), default=None)
        rendered = [self._within_limit(*one, keep) for one in encoded]
        there = [one.token_ids.tobytes() for one in rendered if one is not None]
        if len(set(there)) == len(there):
            return rendered
        self.skipped.add("without a difference", f"{encoded[0][2]}: its responses have the same tokens")
        return [None] * len(rendered)

    def _encode(self, conversation: Conversation) -> tuple[list[int], list[int], str]:
        """Returns tokens, what is trained of them, and the conversation's name in errors."""
        what = conversation.place or "a conversation"
        if isinstance(conversation.completion, str):
            token_ids, mask = self._text(conversation, what)
        else:
            token_ids, mask = self._messages(conversation, what)
        if mask:
            mask[0] = 0
        return token_ids, mask, what

    # --- text

    def _text(self, conversation: Conversation, what: str) -> tuple[list[int], list[int]]:
        """Returns prompt, turns, completion and stop token. Without a prompt the text begins as a prompt does. What the
        model reads between two turns has its own tokens, as in an episode."""
        if not isinstance(conversation.prompt, str):
            raise ConfigError(
                f"{what}: the completion is text, and the prompt is messages. Give both as one or the other."
            )
        text, stop = self._ends.split(str(conversation.completion))
        first, *written = [*(writes for writes, _ in conversation.turns), text]
        if conversation.prompt:
            prompt, begun, is_whole = self._renderer.completed(conversation.prompt, first, what, conversation)
            self._tell_split(is_whole, what)
        else:
            refuse_for_text(conversation, what)
            prompt, begun = [], self._texts.beginning(first, f"{what}: the completion")
        pieces = [(prompt, int(conversation.trained == "all")), (begun, 1)]
        for (_, reads), writes in zip(conversation.turns, written, strict=True):
            pieces += [(self._texts.inner(reads, what), 0), (self._texts.inner(writes, what), 1)]
        pieces.append(([self._renderer.end_of_text if stop is None else stop], 1))
        return [token for piece, _ in pieces for token in piece], [bit for piece, bit in pieces for _ in piece]

    def _tell_split(self, is_whole: bool, what: str) -> None:
        if not is_whole:
            self.split.add("split", f"{what}: a token of prompt and completion as one text lies across their border")

    # --- messages

    def _messages(self, conversation: Conversation, what: str) -> tuple[list[int], list[int]]:
        prompt, completion = conversation.prompt, conversation.completion
        if isinstance(prompt, str) or isinstance(completion, str):
            raise ConfigError(
                f"{what}: the prompt is text, and the completion is messages. Give both as one or the other."
            )
        messages = [*prompt, *completion]
        text = self._template.text(messages, what, given=conversation)
        if conversation.trained == "all":
            return self._encoded(text, [(0, len(text))], what)
        first = 0 if conversation.trained == "assistant" else len(prompt)
        turns = [
            number
            for number, message in enumerate(messages)
            if number >= first and message["role"] == "assistant" and message.get("trained", True)
        ]
        return self._encoded(text, self._spans(messages, turns, text, conversation, what), what)

    def _spans(
        self, messages: list[Message], turns: Sequence[int], text: str, given: TemplateInputs, what: str
    ) -> list[Span]:
        if turns and (marked := self._template.marked(messages, what, given=given)):
            return self._marked(messages, turns, marked, given, what)
        return [self._between_prefixes(messages, turn, text, given, what) for turn in turns]

    def _marked(
        self,
        messages: list[Message],
        turns: Sequence[int],
        found: tuple[str, list[Span]],
        given: TemplateInputs,
        what: str,
    ) -> list[Span]:
        """Returns the spans that the template marks: one for each assistant turn, or several for each of the last
        ones."""
        text, marked = found
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if len(marked) == len(answers):
            return [span for number, span in zip(answers, marked, strict=True) if number in turns]
        if len(marked) < len(answers) or turns != answers[-len(turns) :]:
            raise ConfigError(
                f"{what}: the chat template marks {len(marked)} parts by {{% generation %}}, and the conversation has"
                f" {len(answers)} assistant turns, of which {len(turns)} are trained. Mark each turn once."
            )
        before = self._template.text(messages[: turns[0]], what, given=given)
        return [span for span in marked if span[0] >= _common(before, text)]

    def _between_prefixes(
        self, messages: list[Message], turn: int, text: str, given: TemplateInputs, what: str
    ) -> Span:
        before = self._template.text(messages[:turn], what, opens_answer=True, given=given)
        until = self._template.text(messages[: turn + 1], what, given=given)
        if not until.startswith(before):
            raise ConfigError(
                f"{what}: the model's chat template ends a prompt with {before[-20:]!r}, and does not write the answer"
                f" of message {turn + 1} after that (it may open a thought that the answer has not), so the tokens that"
                f" are trained cannot be told. {_MARK_IT}"
            )
        if not text.startswith(until):
            raise ConfigError(
                f"{what}: the model's chat template writes message {turn + 1} of {len(messages)} otherwise when others"
                " follow (templates that leave out earlier thoughts do), so the tokens of it that are trained cannot be"
                f" told. Train the last turn alone (trained: completion), or mark the turns. {_MARK_IT}"
            )
        return len(before), len(until)

    # --- tokens

    def _encoded(self, text: str, spans: list[Span], what: str) -> tuple[list[int], list[int]]:
        """Returns the text's tokens, with 1 for those within the spans.

        Where a token would lie across a span's border, both sides are encoded by themselves: a model that answers a
        prompt goes on after the prompt's own tokens.
        """
        from headway.learner.models.pretrained import (
            encoding,
        )  # imports torch, which callers that only read do not need

        whole = encoding(self._tokenizer, text, what, add_special_tokens=False)
        token_ids = list(whole.input_ids)
        borders = sorted({0, len(text), *(border for span in spans for border in span)})
        cuts = [_token_at(whole, border) for border in borders[1:-1]]
        for number, border in enumerate(borders[1:-1]):
            if number == 0 or not whole.is_fast:  # the first one ends a prompt, as reinforcement learning has it
                before = self._texts.plain(text[:border], what)
                cuts[number] = len(before) if token_ids[: len(before)] == before else None
        if None in cuts:
            self._tell_split(False, what)
            first, *rest = (text[begin:end] for begin, end in pairwise(borders))
            encoded = [self._texts.plain(first, what), *(self._texts.inner(piece, what) for piece in rest)]
        else:
            encoded = [token_ids[begin:end] for begin, end in pairwise([0, *cuts, len(token_ids)])]
        trained = [(begin, end) in spans for begin, end in pairwise(borders)]
        for number in (number for number, one in enumerate(trained) if one):
            self._move_stop_token(encoded, number, what)
        ends = [self._trained_length(piece) if one else 0 for one, piece in zip(trained, encoded, strict=True)]
        masks = [[1] * end + [0] * (len(piece) - end) for end, piece in zip(ends, encoded, strict=True)]
        return [token for piece in encoded for token in piece], [bit for mask in masks for bit in mask]

    def _move_stop_token(self, pieces: list[list[int]], number: int, what: str) -> None:
        """Moves a stop token that follows a trained turn into it, in place, and adds one where the text has none.

        Raises ConfigError where other messages follow without one: no model learns to end from that.
        """
        piece, behind, stops = pieces[number], pieces[number + 1 :], self._ends.token_ids
        if not any(token in stops for token in piece):
            if not any(behind):
                piece.append(self._renderer.end_of_turn)
            elif not any(token in stops for tokens in behind for token in tokens):
                raise ConfigError(
                    f"{what}: the model's chat template writes no stop token behind an answer, and another message"
                    " follows, so the model would not learn to end an answer. Train the last turn alone (trained:"
                    " completion), or give a template that ends each one (model.chat_template=FILE)."
                )
            else:
                length = next((place + 1 for place, token in enumerate(behind[0]) if token in stops), 0)
                if not str(self._tokenizer.decode(behind[0][: max(length - 1, 0)])).strip():
                    piece += behind[0][:length]
                    del behind[0][:length]

    def _trained_length(self, piece: list[int]) -> int:
        """Returns the length of a trained turn up to its stop token; what the template writes after that is context."""
        stops = self._ends.token_ids
        return max((place + 1 for place, token in enumerate(piece) if token in stops), default=len(piece))

    # --- length

    def _kept_prompt(self, token_ids: list[int], mask: list[int]) -> int | None:
        """Returns how many tokens of its prompt a conversation may keep, at least one; None: all."""
        too_many = len(token_ids) - self._limit.max_tokens
        if self._limit.too_long != "cut_prompt" or not self._limit.max_tokens or too_many <= 0 or 1 not in mask:
            return None
        return max(mask.index(1) - too_many, 1)

    def _within_limit(self, token_ids: list[int], mask: list[int], what: str, keep: int | None) -> Rendered | None:
        """Returns the conversation with the last `keep` tokens of its prompt, if it has more, cut at the limit."""
        limit, length = self._limit, len(token_ids)
        if limit.max_tokens and length > limit.max_tokens:
            if limit.too_long == "refuse":
                raise ConfigError(
                    f"{what} has {length:,} tokens, and max_tokens is {limit.max_tokens:,}. Raise it, or set"
                    " too_long to drop, cut_end or cut_prompt."
                )
            if limit.too_long == "drop":
                self.skipped.add("too long", f"{what} has {length:,} tokens")
                return None
        begin = max(mask.index(1) - keep, 0) if keep is not None and 1 in mask else 0
        token_ids, mask = (each[begin:][: limit.max_tokens or None] for each in (token_ids, mask))
        if len(token_ids) < length:
            self.cut.add("cut", f"{what} has {length:,} tokens")
        if not any(mask):
            self.skipped.add("without a trained token", f"{what} has none")
            return None
        return Rendered(token_ids=np.asarray(token_ids, np.int32), loss_mask=np.asarray(mask, np.uint8))


def _common(first: str, second: str) -> int:
    """Returns the number of characters with which both begin."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((number for number, (one, other) in pairs if one != other), min(len(first), len(second)))


def _token_at(whole: "BatchEncoding", border: int) -> int | None:
    """Returns the number of the token that begins at a character; None if none does, or if a tokenizer in Python is to
    tell.

    Some tokenizers leave the white space before a word out of its token's characters, so the token before must end
    there.
    """
    if not whole.is_fast:
        return None
    token = whole.char_to_token(border)
    if token is None or whole.token_to_chars(token).start != border:
        return None
    return token if token == 0 or whole.token_to_chars(token - 1).end == border else None
