"""Digests of conversations, each made of the one before it and a message, so that a longer one costs its new messages.

tools ─► link ─ message ─► link ─ message ─► link      each with two digests: of what is asked, and of what is said
"""

import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from .conversation import Message, Tool, content_of


class Link(NamedTuple):
    """A conversation up to a message."""

    message: Message
    """The last one; {} where there is none yet."""
    asked: bytes
    """The digest of all that a client has sent."""
    said: bytes
    """The digest of what that says: equal whatever a client leaves out of, or adds to, the messages that it repeats."""

    def then(self, message: Message) -> "Link":
        """Return the conversation with a further message."""
        asked, said = _digest(self.asked, message), _digest(self.said, _canonical(message))
        return Link(message, asked, said)


class ConversationDigests:
    """Links of the newest conversation: what the next one repeats of it is not digested anew."""

    def __init__(self) -> None:
        self._tools = b""
        self._links: list[Link] = []

    def links(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Link]:
        """Return a link for the beginning, and one for each message."""
        encoded = _encoded(tools)
        if not self._links or encoded != self._tools:
            first = _digest(b"", tools)
            self._tools, self._links = encoded, [Link({}, first, first)]
        links = self._links[:1]
        for message, known in zip(messages, self._links[1:], strict=False):
            if known.message is not message and known.message != message:
                break
            links.append(known)
        for message in messages[len(links) - 1 :]:
            links.append(links[-1].then(message))
        self._links = links
        return links


def digest_of_call(link: Link, *more: Any) -> str:
    """Return the digest of a call: of its conversation, and of what else it asks."""
    return _digest(link.asked, more).hex()


def _digest(before: bytes, value: Any) -> bytes:
    return blake2b(before + _encoded(value), digest_size=16).digest()


def _encoded(value: Any) -> bytes:
    return msgspec.json.encode(value, order="deterministic")


def _canonical(message: Message) -> tuple[Any, ...]:
    calls = [
        (one["function"].get("name"), _plain(one["function"].get("arguments")))
        for one in message.get("tool_calls") or ()
    ]
    return message.get("role"), content_of(message).strip(), calls


def _plain(arguments: Any) -> Any:
    """Return what arguments say in the one way in which `json` writes it, in ASCII: a model may write half of a
    surrogate pair, which no UTF-8 has. What is no JSON stays as it is."""
    try:
        return json.dumps(json.loads(arguments) if isinstance(arguments, str) else arguments, sort_keys=True)
    except (ValueError, TypeError, RecursionError):
        return arguments
