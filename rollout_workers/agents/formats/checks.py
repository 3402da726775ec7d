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


class TrialConversation(NamedTuple):
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
TRIALS = (
    TrialConversation([_ASKED], _ANSWERED, [_ASKED_MORE], []),
    TrialConversation([_says("system", "Be brief."), _ASKED, _ANSWERED, _ASKED], _ANSWERED, [_ASKED_MORE], []),
    TrialConversation([_ASKED], _CALLED, [_found(0, "a <b>\n{}")], [_TOOL]),
    TrialConversation(
        [_says("system", "Be brief."), _ASKED, _CALLED, _found(0, "1")], _CALLED, [_found(0, "2")], [_TOOL]
    ),
    TrialConversation([_ASKED, _CALLED, _found(0, "1")], _ANSWERED, [_ASKED_MORE], [_TOOL]),
    TrialConversation(
        [_ASKED], _calls("{}", '{"word":"b"}'), [_found(0, "1"), _found(1, "2")], [_TOOL], is_needed=False
    ),
    TrialConversation([_ASKED], _CALLED, [_found(0, "1"), _ASKED_MORE], [_TOOL], is_needed=False),
    TrialConversation([_ASKED], _ANSWERED, [_says("system", "Be long."), _ASKED], [], is_needed=False),
)


def check_bridges(chat_format: TemplateFormat, trials: Sequence[TrialConversation] = TRIALS) -> None:
    """Raise ConfigError where the template writes behind an answer something else than the format does, in text or in
    tokens, or where the format does not read an answer as the template writes it."""
    for trial in trials:
        try:
            _check(chat_format, trial)
        except FormatError as error:
            if trial.is_needed:
                raise ConfigError(
                    f"agent.format.kind={chat_format.name} cannot express a usual conversation: {error}"
                    " Give a template that does (model.chat_template=FILE), or another format."
                ) from error


def _check(chat_format: TemplateFormat, trial: TrialConversation) -> None:
    prompt = chat_format.render(trial.before, trial.tools)
    whole = chat_format.text([*trial.before, trial.answer, *trial.after], trial.tools)
    following = chat_format.following_text(trial.after, trial.tools)[0]
    if not whole.endswith(following) or not following.endswith(chat_format.opening_text):
        raise _unfit(chat_format, f"{following[:200]!r} does not follow all answers, but depends on the conversation")
    expected = chat_format.vocabulary.encode(whole)
    bridge = chat_format.bridge([*prompt, chat_format.end], trial.after, trial.tools) or []
    if not bridge or expected[-len(bridge) - 1 :] != [chat_format.end, *bridge]:
        raise _unfit(chat_format, f"the tokens of {following[:200]!r} are others behind an answer than alone")
    _check_read(chat_format, trial, whole[: len(whole) - len(following)])


def _check_read(chat_format: TemplateFormat, trial: TrialConversation, text: str) -> None:
    """Raise ConfigError where the answer with which a text ends is not read as it is written."""
    header = chat_format.opening_text.partition("<think>")[0]
    answer = "</think>" * chat_format.begins_thought + text.rpartition(header)[2]
    read = chat_format.parse([*chat_format.vocabulary.encode(answer), chat_format.end], trial.tools).message()
    calls = [call["function"] for call in read.get("tool_calls", ())]
    if calls != [call["function"] for call in trial.answer.get("tool_calls", ())]:
        raise _unfit(chat_format, f"the call in {answer!r} is read as {calls}")
    if (read["content"] or "").strip() != trial.answer["content"]:
        raise _unfit(chat_format, f"the answer {trial.answer['content']!r} is read as {read['content']!r}")


def _unfit(chat_format: TemplateFormat, reason: str) -> ConfigError:
    return ConfigError(
        f"The model's chat template does not fit the format {chat_format.name}: {reason}."
        " Give another one (model.chat_template=FILE), or another format."
    )
