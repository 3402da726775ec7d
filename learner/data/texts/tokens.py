"""Texts become tokens that are right at their borders: where a sequence begins, where a response follows its prompt,
and where it ends.
"""

import re
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from headway.broker.errors import ConfigError
from headway.learner.models.end_tokens import end_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Ends:
    """The tokens with which a model ends what it says, in texts that state them."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All of them. Raises ConfigError for a model without any."""
        return end_tokens(self._tokenizer).any

    def split(self, text: str) -> tuple[str, int | None]:
        """Returns a text without the end tokens that it states at its end, and the white space after them; and the
        first of these tokens."""
        if found := self._behind.search(text):
            return text[: found.start()], int(self._tokenizer.convert_tokens_to_ids(found[1]))
        return text, None

    def count(self, text: str) -> int:
        """Returns how often a text states end tokens."""
        return len(self._any.findall(text))

    @cached_property
    def _any(self) -> re.Pattern[str]:
        known = {*self._tokenizer.all_special_ids, *self._tokenizer.added_tokens_decoder}
        # A configuration of another vocabulary may name the token of a word, which texts end with, too.
        tokens = self._tokenizer.convert_ids_to_tokens([token for token in self.token_ids if token in known])
        return re.compile("|".join(map(re.escape, tokens)) or "(?!)")

    @cached_property
    def _behind(self) -> re.Pattern[str]:
        return re.compile(rf"({self._any.pattern})\s*(?:(?:{self._any.pattern})\s*)*\Z")


class Continuation(NamedTuple):
    """A text and what follows it, as tokens."""

    before: list[int]
    after: list[int]
    is_whole: bool
    """Whether these are the tokens of both texts as one. If not, one of those would lie across the border."""


class TextTokens:
    """Makes tokens of texts. Raises ConfigError, naming `what`, for text that the tokenizer cannot encode."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer

    def plain(self, text: str, what: str) -> list[int]:
        """Returns a text's own tokens."""
        from headway.learner.models.model import encode  # imports torch, which callers that only read do not need

        return encode(self._tokenizer, text, what, add_special_tokens=False)

    def beginning(self, text: str, what: str) -> list[int]:
        """Returns the tokens of a text with which a sequence begins. What the tokenizer puts in front of a text, such
        as BOS, is there once, if the text has it or not. What it puts behind one is left out: more text follows."""
        plain, front = self.plain(text, what), self._front
        return plain if not plain or plain[: len(front)] == front else [*front, *plain]

    def continued(self, before: list[int], text: str, after: str, what: str) -> Continuation:
        """Returns `before`, the tokens of `text`, and those of `after`, which follows it. They are the tokens of both
        texts as one, if that begins with `before`."""
        plain = self.plain(text + after, what)
        front = self._front if before[: len(self._front)] == self._front != plain[: len(self._front)] else []
        whole = [*front, *plain]
        if whole[: len(before)] == before:
            return Continuation(before, whole[len(before) :], True)
        return Continuation(before, self.inner(after, what), False)

    def inner(self, text: str, what: str) -> list[int]:
        """Returns the tokens of a text that stands within another one: without the space that some tokenizers put in
        front of a text."""
        if not self._puts_space:
            return self.plain(text, what)
        line, behind = self.plain("\n", what), self.plain(f"\n{text}", what)
        return behind[len(line) :] if behind[: len(line)] == line else self.plain(text, what)

    @cached_property
    def _front(self) -> list[int]:
        """The tokens that the tokenizer puts in front of a text."""
        if not self._tokenizer.num_special_tokens_to_add():
            return []
        plain, added = (list(self._tokenizer("a", add_special_tokens=add).input_ids) for add in (False, True))
        begins = (n for n in range(len(added)) if added[n : n + len(plain)] == plain)
        return added[: next(begins, 0)]

    @cached_property
    def _puts_space(self) -> bool:
        """Whether the tokenizer puts a space in front of a text, as that of Llama 2 does."""
        try:
            alone, line, behind = (self.plain(text, "a text") for text in ("a", "\n", "\na"))
        except ConfigError:  # a tokenizer of characters that has not all of these puts none
            return False
        return behind[: len(line)] == line and behind[len(line) :] != alone
