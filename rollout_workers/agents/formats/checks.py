"""Checks at opening that what a format says follows an answer is what its template writes there.

A template may rewrite what stands before, such as Qwen3's, which leaves out old thoughts. That does no harm: what
was sampled is not rendered again. Behind the last answer it must write the same after any conversation.
"""

from collections.abc import Sequence
from typing import NamedTuple

from headway.broker.errors import ConfigError
from headway.rollout_workers.agents.conversation import FormatError, Message, Tool

from .template import TemplateFormat

_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}, "exact": {"type": "boolean"}}},
    },
}


class Sample(NamedTuple):
    """A conversation up to an answer, the answer, and what follows it."""

    before: list[Message]
    answer: Message
    after: list[Message]
    tools: list[Tool]
    is_needed: bool = True
    """Whether a template that refuses it does not fit; else the format refuses such conversations, too."""


def _says(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _calls(*arguments: str) -> Message:
    calls = [
        {"id": f"call_{place}", "type": "function", "function": {"name": "lookup", "arguments": each}}
        for place, each in enumerate(arguments)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _found(place: int, content: str) -> Message:
    return {"role": "tool", "tool_call_id": f"call_{place}", "name": "lookup", "content": content}


_ASKED, _ASKED_MORE = _says("user", "What is it?"), _says("user", "And what\n\nelse?")
_ANSWERED = _says("assistant", "It is this.")
_CALLED = _calls('{"word": "é", "exact": false}')
SAMPLES = (
    Sample([_ASKED], _ANSWERED, [_ASKED_MORE], []),
    Sample([_says("system", "Be brief."), _ASKED, _ANSWERED, _ASKED], _ANSWERED, [_ASKED_MORE], []),
    Sample([_ASKED], _CALLED, [_found(0, "a <b>\n{}")], [_TOOL]),
    Sample([_says("system", "Be brief."), _ASKED, _CALLED, _found(0, "1")], _CALLED, [_found(0, "2")], [_TOOL]),
    Sample([_ASKED, _CALLED, _found(0, "1")], _ANSWERED, [_ASKED_MORE], [_TOOL]),
    Sample([_ASKED], _calls("{}", '{"word":"b"}'), [_found(0, "1"), _found(1, "2")], [_TOOL], is_needed=False),
    Sample([_ASKED], _CALLED, [_found(0, "1"), _ASKED_MORE], [_TOOL], is_needed=False),
    Sample([_ASKED], _ANSWERED, [_says("system", "Be long."), _ASKED], [], is_needed=False),
)


def check_bridges(chat_format: TemplateFormat, samples: Sequence[Sample] = SAMPLES) -> int:
    """Return in how many samples the template wrote all that stood before as it was. Raises ConfigError where it
    writes behind an answer something else than the format does, or where calls are not read as they are written."""
    count = 0
    for sample in samples:
        try:
            count += _check(chat_format, sample)
        except FormatError as error:
            if sample.is_needed:
                raise ConfigError(
                    f"The format {chat_format.name} cannot express a usual conversation: {error}"
                    " Give a template that does (model.chat_template=FILE), or another format."
                ) from error
    if not count and not chat_format.writes_reasoning:
        raise _unfit(chat_format, "it rewrites what stands before in all conversations")
    return count


def _check(chat_format: TemplateFormat, sample: Sample) -> bool:
    """Return whether the template wrote what stood before as it was."""
    opened = chat_format.text(sample.before, sample.tools)
    whole = chat_format.text([*sample.before, sample.answer, *sample.after], sample.tools)
    following = chat_format.following_text(sample.after, sample.tools)[0]
    if not whole.endswith(following) or not following.endswith(chat_format.opening_text):
        raise _unfit(chat_format, f"{following[:200]!r} does not follow all answers, but depends on the conversation")
    if not whole.startswith(opened):
        return False
    encode, answer = chat_format.vocabulary.encode, whole[len(opened) : len(whole) - len(following)]
    before, sampled, expected = encode(opened), encode(answer), encode(whole)
    _check_read(chat_format, sample, [*sampled, chat_format.end])
    for ended in ([], [chat_format.end]):
        previous = [*before, *sampled, *ended]
        if [*previous, *(chat_format.bridge(previous, sample.after, sample.tools) or [])] != expected:
            raise _unfit(chat_format, f"the tokens of {whole[-200:]!r} are others as a whole than in parts")
    return True


def _check_read(chat_format: TemplateFormat, sample: Sample, answer: list[int]) -> None:
    read = chat_format.parse(answer, sample.tools).message()
    calls = [call["function"] for call in read.get("tool_calls", ())]
    if calls != [call["function"] for call in sample.answer.get("tool_calls", ())]:
        raise _unfit(chat_format, f"the call in {chat_format.vocabulary.decode(answer)!r} is read as {calls}")
    if (read["content"] or "").strip() != sample.answer["content"]:
        raise _unfit(chat_format, f"the answer {sample.answer['content']!r} is read as {read['content']!r}")


def _unfit(chat_format: TemplateFormat, reason: str) -> ConfigError:
    return ConfigError(
        f"The model's chat template does not fit the format {chat_format.name}: {reason}."
        " Give another one (model.chat_template=FILE), or another format."
    )
