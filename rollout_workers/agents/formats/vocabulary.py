"""A tokenizer's texts and tokens, where what somebody wrote never becomes a token that the format itself writes."""

import re
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from headway.rollout_workers.agents.conversation import FormatError


class Vocabulary:
    """Makes tokens of texts, and texts of tokens.

    A text may be *cut*: a character that stands in no text marks a place across which no token may reach. Each cut lies
    within the name of an added token that somebody wrote in a message, which thus stays a text. Threads may share it.
    """

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer`: one of transformers."""
        self.tokenizer = tokenizer
        self._lock = threading.Lock()  # a tokenizer in Rust may raise where two threads use it
        added = tokenizer.added_tokens_decoder
        self.added: dict[str, int] = {token.content: number for number, token in added.items()}
        """Tokens that a tokenizer finds in a text before all others, by their text."""
        special = {token.content for token in added.values() if token.special}
        self._special = _any_of(special | set(tokenizer.all_special_tokens))
        # A run of spaces that a tokenizer has as an added token is ordinary text.
        self._added = _any_of(text for text in {*self.added, *special} if text.strip())

    def guarded(self, text: str, cut: str, *, is_trusted: bool = False) -> str:
        """Return a text with cuts in the names of added tokens. A trusted one, of the model itself or of who wrote the
        agent, keeps those that are not special, such as `<think>`."""
        return (self._special if is_trusted else self._added).sub(lambda one: one[0][0] + cut + one[0][1:], text)

    def encode(self, text: str, cut: str = "") -> list[int]:
        """Return the tokens of a text. Raises FormatError for one that the tokenizer cannot encode."""
        first, *others = text.split(cut) if cut else [text]
        tokens = self._encoded(first)
        for other in others:
            tokens += self._encoded_within(other)
        return tokens

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of any numbers; those that are no tokens have none."""
        known = [one for one in token_ids if 0 <= one < self._size]
        with self._lock:
            return str(self.tokenizer.decode(known, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def front(self) -> list[int]:
        """Return the tokens that the tokenizer puts in front of a text."""
        if not self.tokenizer.num_special_tokens_to_add():
            return []
        added, plain = (list(self.tokenizer("a", add_special_tokens=each).input_ids) for each in (True, False))
        begins = (place for place in range(len(added)) if added[place : place + len(plain)] == plain)
        return added[: next(begins, 0)]

    @cached_property
    def _size(self) -> int:
        return len(self.tokenizer)

    def _encoded(self, text: str) -> list[int]:
        if not text:
            return []
        try:
            with self._lock:
                tokens = self._encode(text)
        except Exception as error:  # a tokenizer of characters raises a bare exception for one that it lacks
            raise FormatError(f"The model's tokenizer cannot encode {text[:80]!r}: {error}.") from error
        if sum(map(self._numbers.__contains__, tokens)) > len(self._added.findall(text)):
            raise FormatError(f"The model's tokenizer makes a special token of {text[:200]!r}, which names none.")
        return tokens

    @cached_property
    def _encode(self) -> Callable[[str], list[int]]:
        """Makes tokens of a text: by the tokenizer in Rust itself where transformers adds nothing, as what it does
        around that takes four times as long with a short text."""
        from transformers import PreTrainedTokenizerFast

        def encode(text: str) -> list[int]:
            return list(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

        def encode_alone(text: str) -> list[int]:
            return list(rust.encode(text, add_special_tokens=False).ids)

        made, usual = type(self.tokenizer), PreTrainedTokenizerFast
        ways = ("__call__", "_encode_plus", "_batch_encode_plus")
        if not issubclass(made, usual) or any(getattr(made, way, 0) is not getattr(usual, way, 0) for way in ways):
            return encode
        with suppress(Exception):  # of a tokenizer of characters that lacks this one
            encode("a")  # from then on it neither cuts nor pads
        rust = self.tokenizer.backend_tokenizer
        return encode if rust.truncation or rust.padding or rust.encode_special_tokens else encode_alone

    def _encoded_within(self, text: str) -> list[int]:
        """Return the tokens of a text that follows another one: without the space that some tokenizers begin with."""
        if not self._puts_space:
            return self._encoded(text)
        line, behind = self._encoded("\n"), self._encoded(f"\n{text}")
        if behind[: len(line)] != line:
            raise FormatError(f"The model's tokenizer cannot encode {text[:80]!r} behind other text.")
        return behind[len(line) :]

    @cached_property
    def _puts_space(self) -> bool:
        try:
            alone, line, behind = (self._encoded(text) for text in ("a", "\n", "\na"))
        except FormatError:  # a tokenizer of characters that lacks one of these puts none
            return False
        return behind[: len(line)] == line and behind[len(line) :] != alone

    @cached_property
    def _numbers(self) -> frozenset[int]:
        return frozenset(number for text, number in self.added.items() if text.strip())


def load_tokenizer(model: Path) -> Any:
    """Read the tokenizer of a model directory, as a worker does for all else."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model, trust_remote_code=False)


def _any_of(texts: Any) -> re.Pattern[str]:
    """Return a pattern of any of these texts, where the longest counts; of none, one that is never found."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=lambda text: (-len(text), text)))) or "(?!)")
