"""The seam of the dialects: a dialect turns its requests into calls, and answers and problems into what its clients
read."""

from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

from headway.rollout_workers.agents.calls import ChatAnswer, ChatCall, Session

from .problems import Problem


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A request that a dialect has read."""

    call: ChatCall
    streams: bool = False
    """Whether the client wants events."""
    fields: dict[str, Any] = {}
    """The request's own fields, for what the answer's shape depends on."""


class Dialect(Protocol):
    """The language of one kind of client."""

    def read(self, body: dict[str, Any], *, ignores_sampling: bool) -> Asked:
        """Return what a request asks. Raises CallRefusedError for what cannot be honoured."""
        ...

    def answer(self, asked: Asked, answer: ChatAnswer, session: Session) -> dict[str, Any]:
        """Return the body of a response."""
        ...

    def events(self, asked: Asked, answer: ChatAnswer, session: Session) -> Iterable[bytes]:
        """Yield the events of a response that streams, in all."""
        ...

    def error(self, problem: Problem) -> dict[str, Any]:
        """Return the body of a response that tells a problem."""
        ...

    def error_event(self, problem: Problem) -> bytes:
        """Return the event that tells a problem in a response that has begun."""
        ...


def event(data: Any, name: str = "") -> bytes:
    """Return a server-sent event."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + msgspec.json.encode(data) + b"\n\n"


OPENAI_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    410: "session_ended_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class OpenAIErrors:
    """Errors as OpenAI's clients read them."""

    def error(self, problem: Problem) -> dict[str, Any]:
        """Return the body of a response that tells a problem."""
        told = {
            "message": problem.message,
            "type": OPENAI_TYPES.get(problem.status, "invalid_request_error"),
            "param": problem.field or None,
            "code": "unsupported_value" if problem.kind == "refused" and problem.field else problem.kind,
        }
        return {"error": told}

    def error_event(self, problem: Problem) -> bytes:
        """Return the event that tells a problem in a response that has begun."""
        return event(self.error(problem))


def token_logprobs(answer: ChatAnswer, session: Session, *, names_ids: bool = False) -> dict[str, Any]:
    """Return the logprobs of an answer's tokens as chat completions have them. With `names_ids` a token's text is
    `token_id:ID`, as vLLM's clients may ask."""
    entries = []
    for token_id, logprob in zip(answer.token_ids, answer.logprobs, strict=True):
        text = f"token_id:{token_id}" if names_ids else session.text_of([token_id])
        # A part of a character has no text of its own, so its bytes are not known here.
        known = None if "\ufffd" in text else list(text.encode())
        entries.append({"token": text, "bytes": known, "logprob": logprob, "top_logprobs": []})
    return {"content": entries, "refusal": None}
