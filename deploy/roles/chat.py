"""`headway chat`: a conversation with a trained model, in one engine in this process."""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Literal, Self

import msgspec

from headway.broker.errors import ConfigError
from headway.learner.config import ModelConfig
from headway.learner.data.prompts.base import Message
from headway.learner.data.prompts.rendering import Renderer
from headway.learner.models.pretrained import load_tokenizer
from headway.rollout_workers.decoding import response_text
from headway.rollout_workers.engines.base import GenerationRequest
from headway.rollout_workers.samples.generation import generate
from headway.rollout_workers.samples.recorder import Recorder

from .trained_model import GenerationSettings, TrainedModel, open_trained, own_decoding

INCOMPLETE = "\ufffd"
"""The sign that a decoder writes for a character whose last bytes are still to come."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The model's answer."""

    text: str
    tokens: int
    finish_reason: Literal["stop", "length", "interrupted"]
    forgotten: int
    """The oldest messages that were left out, as the model has no room for them any more."""


class Chat:
    """The messages so far, and the engine that answers. Without a chat template each message is continued on its
    own."""

    def __init__(self, model: TrainedModel, settings: GenerationSettings, system: str) -> None:
        """Open the engine. Raises ConfigError for a system message that the model has no place for."""
        self._path = model.path
        self._settings = settings
        tokenizer = load_tokenizer(ModelConfig(path=str(model.path)))
        self.has_template = bool(tokenizer.chat_template)
        if system and not self.has_template:
            raise ConfigError(
                "There is a system message, but the model's tokenizer has no chat template. Leave it out."
            )
        self._renderer = Renderer(tokenizer)
        self._decoding = own_decoding(ModelConfig(path=str(model.path)), settings.sampling)
        self._system: list[Message] = [{"role": "system", "content": system}] if system else []
        self._messages: list[Message] = []
        self._runner = asyncio.Runner()
        try:
            self._engine = self._runner.run(open_trained(model, settings, secrets.randbits(31)))
        except BaseException:
            self._runner.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.run(self._engine.close())
        self._runner.close()

    def say(self, message: str, on_text: Callable[[str], None] = lambda text: None) -> Reply:
        """Return the model's answer. `on_text` gets it piece by piece as the engine generates it.

        Ctrl-C stops the answer, and the conversation goes on with what there is of it. Raises ConfigError for a message
        that the tokenizer cannot encode, or that leaves no room for an answer; the conversation is as before then.
        """
        messages = [*self._messages, {"role": "user", "content": message}] if self.has_template else message
        tokens, forgotten = self._fitting(messages)
        recorder, stream = Recorder(), _TextStream(on_text)

        def on_tokens(count: int) -> None:
            stream.until(self._text(recorder).rstrip(INCOMPLETE))

        is_interrupted = False
        try:
            self._runner.run(generate(self._engine, self._request(tokens), recorder, on_tokens))
        except KeyboardInterrupt:
            is_interrupted = True
        text = self._text(recorder)
        stream.until(text)
        if not isinstance(messages, str):
            self._messages = [*messages[forgotten:], {"role": "assistant", "content": text}]
        return Reply(
            text=text,
            tokens=len(recorder.tokens),
            finish_reason="interrupted" if is_interrupted else recorder.finished(),
            forgotten=forgotten,
        )

    def _text(self, recorder: Recorder) -> str:
        return response_text(self._decoding, recorder.tokens)

    def _fitting(self, messages: str | list[Message]) -> tuple[list[int], int]:
        """Return the prompt's tokens, and how many of the oldest messages it leaves out to leave room for the answer:
        `sampling.max_new_tokens`, but at most half of what the engine takes."""
        most = self._engine.max_model_len
        room = min(self._settings.sampling.max_new_tokens, most // 2)
        for forgotten in range(0, 1 if isinstance(messages, str) else len(messages), 2):
            kept = messages if isinstance(messages, str) else [*self._system, *messages[forgotten:]]
            tokens = self._renderer.render(kept, "the message")[1]
            if not tokens:
                raise ConfigError("The message has no tokens.")
            if len(tokens) + room <= most:
                return tokens, forgotten
        raise ConfigError(
            f"The message has {len(tokens)} tokens, and engine.max_model_len={most} is for the answer, too. Raise it,"
            " or write less."
        )

    def _request(self, tokens: Sequence[int]) -> GenerationRequest:
        sampling = self._settings.sampling
        return GenerationRequest(
            request_id=f"chat-{secrets.token_hex(4)}",
            prompt_tokens=list(tokens),
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=list(self._decoding.stop_token_ids),
        )


class _TextStream:
    """Passes on what is new of a growing text."""

    def __init__(self, on_text: Callable[[str], None]) -> None:
        self._on_text = on_text
        self._length = 0

    def until(self, text: str) -> None:
        if new := text[self._length :]:
            self._length = len(text)
            self._on_text(new)
