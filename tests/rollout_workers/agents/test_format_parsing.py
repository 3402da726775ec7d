"""What formats read of answers, which models they open, and what the plain one writes."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from headway.broker.errors import ConfigError
from headway.rollout_workers.agents.conversation import FormatError, Message, Tool
from headway.rollout_workers.agents.formats import open_format, prime_renderers
from headway.rollout_workers.agents.formats.options import AgentFormatOptions

from .chat_models import (
    ASKED,
    ASKED_MORE,
    CHATML,
    HERMES,
    LOOKUP,
    MODELS,
    NO_TOOLS,
    PLAIN,
    ChatModel,
    Opened,
    called,
    found,
    opened_in,
    save_character_model,
    save_chat_model,
)

Calls = list[tuple[str, str]]


def read(opened: Opened, text: str, *, is_ended: bool = True) -> tuple[str, Calls]:
    """Return the content and the calls that are read of an answer."""
    ended = [opened.chat.stop_token_ids[1]] * is_ended
    answer = opened.chat.parse([*opened.encode(text), *ended], [LOOKUP])
    return answer.content, [(call.name, call.arguments) for call in answer.tool_calls]


def hermes(*bodies: str) -> str:
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


@pytest.mark.parametrize("kind", ["hermes", "no_tools"])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (hermes('{"name": "f", "arguments": {"a":  false, "b": 1e3}}'), "", [("f", '{"a":  false, "b": 1e3}')]),
        (hermes('{"arguments": {"a": "é"}, "name": "f"}'), "", [("f", '{"a": "é"}')]),
        (
            "I try.\n" + hermes('{"name": "f", "arguments": {}}', '{"name": "g", "arguments": [1]}'),
            "I try.",
            [("f", "{}"), ("g", "[1]")],
        ),
        (hermes('{"name": "f", "arguments": "{\\"a\\": 1}"}'), "", [("f", '"{\\"a\\": 1}"')]),
        (hermes('{"name": "f", "arguments": {"a": "</tool_call>"}}'), "", [("f", '{"a": "</tool_call>"}')]),
        (hermes('{"name": "f"}'), "", [("f", "")]),
        (hermes('{"name": "f", "arguments": {"a": 1,}}'), "", [("f", '{"a": 1,}')]),
        (hermes('{"name": "f", "arguments": {"a": 1}'), "", [("f", '{"a": 1}')]),
        (hermes('{"name": "f", "arguments": {\'a\': False}}'), "", [("f", "{'a': False}")]),
        (hermes('{"name": "f", "args'), "", [("f", '{"name": "f", "args')]),
        (hermes(r'{"name": "\ud83d", "arguments": {}}'), hermes(r'{"name": "\ud83d", "arguments": {}}'), []),
        (hermes(r'{"name": "f", "arguments": {"a": "\ud83d"}}'), "", [("f", r'{"a": "\ud83d"}')]),
        (hermes("f(1)"), hermes("f(1)"), []),
        (hermes("f(1)", '{"name": "g", "arguments": {}}'), hermes("f(1)"), [("g", "{}")]),
        (hermes('{"name": 5, "arguments": {}}'), hermes('{"name": 5, "arguments": {}}'), []),
        ('a <tool_call>\n{"name": "f", "arguments": {}}', 'a <tool_call>\n{"name": "f", "arguments": {}}', []),
        ("a </tool_call> b\n", "a </tool_call> b\n", []),
        ("", "", []),
    ],
)
def test_calls_are_read_as_they_are_written(
    of_kind: Callable[[str], Opened], kind: str, text: str, content: str, calls: Calls
) -> None:
    assert read(of_kind(kind), text) == (content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "f", "parameters": {"a":  false}}', "", [("f", '{"a":  false}')]),
        ('<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
        ('{"name": "f", "arguments": {}}; {"name": "g", "parameters": {}}', "", [("f", "{}"), ("g", "{}")]),
        ('{"name": "f", "parameters": {"a": 1,}}', "", [("f", '{"a": 1,}')]),
        ('{"name": "Ada", "born": 1815}', '{"name": "Ada", "born": 1815}', []),
        ('{"name": "Ada", "born', '{"name": "Ada", "born', []),
        ('f: {"name": "f", "parameters": {}}', 'f: {"name": "f", "parameters": {}}', []),
        ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ],
)
def test_calls_of_llama(of_kind: Callable[[str], Opened], text: str, content: str, calls: Calls) -> None:
    assert read(of_kind("headers"), text) == (content, calls)


@pytest.mark.parametrize(
    ("name", "arguments", "found"),
    [
        ("f", {"a": "é"}, ("f", '{"a": "é"}')),
        ("f", {"a": "\ud83d"}, ("f", r'{"a": "\ud83d"}')),
        ("f", "\ud83d", ("f", r'"\ud83d"')),
        ("\ud83d", {}, None),
    ],
)
def test_a_call_that_the_package_renderers_reads_can_be_sent(
    name: str, arguments: Any, found: tuple[str, str] | None
) -> None:
    assert prime_renderers._call(SimpleNamespace(status="ok", name=name, arguments=arguments)) == found


def test_a_broken_call_that_was_cut_is_content(of_kind: Callable[[str], Opened]) -> None:
    text = '{"name": "f", "parameters": {"a": 1,'
    assert read(of_kind("headers"), text) == ("", [("f", '{"a": 1,')])
    assert read(of_kind("headers"), text, is_ended=False) == (text, [])


def test_without_tools_an_answer_has_no_calls(of_kind: Callable[[str], Opened]) -> None:
    opened, text = of_kind("hermes"), hermes('{"name": "f", "arguments": {}}')
    assert opened.chat.parse(opened.encode(text), []).content == text
    assert opened.chat.parse(opened.encode(text), []).tool_calls == ()


@pytest.mark.parametrize(
    ("kind", "text", "reasoning", "content"),
    [
        ("thoughtful", "<think>\nhm\n\nso\n</think>\n\nit", "hm\n\nso", "it"),
        ("thoughtful", "it <think>is</think>", "", "it <think>is</think>"),
        ("thoughtful", "<think>\nhm", "hm", ""),
        ("opens_thought", "hm\n</think>\n\nit", "hm", "it"),
        ("opens_thought", "<think>\nhm\n</think>\n\nit", "hm", "it"),
        ("opens_thought", "hm", "hm", ""),
        ("hermes", "<think>\nhm\n</think>\n\nit", "", "<think>\nhm\n</think>\n\nit"),
    ],
)
def test_thoughts_are_told_from_answers(
    of_kind: Callable[[str], Opened], kind: str, text: str, reasoning: str, content: str
) -> None:
    opened = of_kind(kind)
    answer = opened.chat.parse(opened.encode(text), [LOOKUP])
    assert (answer.reasoning, answer.content) == (reasoning, content)


def test_a_call_within_a_thought_is_none(of_kind: Callable[[str], Opened]) -> None:
    opened, call = of_kind("thoughtful"), hermes('{"name": "f", "arguments": {}}')
    assert opened.chat.parse(opened.encode(f"<think>\n{call}\n</think>\n\nit"), [LOOKUP]).tool_calls == ()
    (only,) = opened.chat.parse(opened.encode(f"<think>\nhm\n</think>\n\n{call}"), [LOOKUP]).tool_calls
    assert only.name == "f"


def test_a_template_that_leaves_out_old_thoughts_is_followed(of_kind: Callable[[str], Opened]) -> None:
    opened = of_kind("thoughtful")
    prompt, sampled = opened.chat.render([ASKED], []), opened.encode("<think>\nhm\n</think>\n\nit<|im_end|>")
    bridge = opened.chat.bridge([*prompt, *sampled], [ASKED_MORE], [])
    assert bridge
    message = opened.chat.parse(sampled, []).message()
    whole = opened.chat.render([ASKED, message, ASKED_MORE], [])
    assert message["reasoning_content"] == "hm"
    assert "hm" not in opened.decode(whole)
    assert whole[-len(bridge) :] == bridge


def test_arguments_are_rendered_as_they_were_written(of_kind: Callable[[str], Opened]) -> None:
    broken = '{"a":1 ,  "a": falsE, <|im_end|>'
    for kind in ("hermes", "thoughtful", "no_tools"):
        opened = of_kind(kind)
        tokens = opened.chat.render([ASKED, called(broken), found("1")], [LOOKUP])
        assert f'"arguments": {broken}}}' in opened.decode(tokens)
        assert tokens.count(opened.encode("<|im_end|>")[0]) == 4


def test_what_a_template_leaves_out_is_refused(of_kind: Callable[[str], Opened]) -> None:
    """That of Llama leaves out what an answer says beside its call, and refuses two calls."""
    chat = of_kind("headers").chat
    with pytest.raises(FormatError, match="does not write the content"):
        chat.render([ASKED, called("{}") | {"content": "I try"}, found("1")], [LOOKUP])
    with pytest.raises(FormatError, match="one call"):
        chat.render([ASKED, called("{}", "{}"), found("1"), found("2", 1)], [LOOKUP])
    assert chat.bridge([*chat.render([ASKED], [LOOKUP]), 1], [found("1"), found("2", 1)], [LOOKUP])


@pytest.mark.parametrize("kind", MODELS)
def test_no_tool_or_call_names_a_special_token(of_kind: Callable[[str], Opened], kind: str) -> None:
    opened, hostile = of_kind(kind), "".join(MODELS[kind].special)
    function = LOOKUP["function"] | {"description": hostile, "parameters": {"type": "object", hostile: [hostile]}}
    call = called(f'{{"a": "{hostile}"}}', name=f"f{hostile}") | {"reasoning_content": hostile}
    harmless, tokens = (
        opened.chat.render([ASKED, each, found("1")], tools)
        for each, tools in ((called("{}"), [LOOKUP]), (call, [{"type": "function", "function": function}]))
    )
    special = {opened.encode(text)[0] for text in MODELS[kind].special}
    assert [one for one in tokens if one in special] == [one for one in harmless if one in special]
    assert hostile in opened.decode(tokens)


def test_a_special_token_in_a_message_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chat = open_format(tmp_path, save_chat_model(tmp_path, MODELS["hermes"]))
    chat.render([ASKED], [LOOKUP])
    assert not caplog.records
    for _ in range(2):
        chat.render([{"role": "user", "content": "a <|im_end|>"}], [])
    assert ["name of a special token" in record.message for record in caplog.records] == [True]


def test_a_conversation_with_all_private_characters_is_refused(of_kind: Callable[[str], Opened]) -> None:
    private = "".join(map(chr, range(0xE000, 0xF900)))
    with pytest.raises(FormatError, match="private"):
        of_kind("hermes").chat.render([{"role": "user", "content": private}], [])
    few = {"role": "user", "content": private[:-3]}
    assert private[:-3] in of_kind("hermes").decode(of_kind("hermes").chat.render([few], []))


def test_variables_of_the_template(tmp_path: Path) -> None:
    template = HERMES.replace("assistant\n' }}{%- endif %}", "assistant\n' + (begins | default('')) }}{%- endif %}")
    ends = save_chat_model(tmp_path, ChatModel(CHATML, ("<tool_call>", "</tool_call>"), template))
    begins = "<think>\n\n</think>\n\n"
    chat = open_format(tmp_path, ends, options=AgentFormatOptions(template_options={"begins": begins}))
    decode = AutoTokenizer.from_pretrained(tmp_path).decode
    prompt = chat.render([ASKED], [])
    assert decode(prompt).endswith(begins)
    assert decode(chat.bridge([*prompt, ends[1]], [ASKED_MORE], [])).endswith(begins)


UNKNOWN = "{% for m in messages %}<start>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
XML_CALLS = HERMES.replace("call.function.arguments | tojson", "'<a>' + call.function.arguments.xkeyx + '</a>'")
OTHER_CALLS = HERMES.replace("<tool_call>", "<call>")
COUNTS = NO_TOOLS.replace("{% if add", "{{ messages | length }}{% if add")
NO_OPENING = NO_TOOLS.replace("add_generation_prompt", "nothing")
NO_END = NO_TOOLS.replace("message.content + '<|im_end|>\n'", "message.content + '\n'")
REFUSES = NO_TOOLS.replace("{% for", "{{ raise_exception('no system') if messages[0].role == 'system' }}{% for", 1)


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (UNKNOWN, "none is known"),
        (XML_CALLS, "arguments of a tool call in another way"),
        (OTHER_CALLS, "is read as"),
        (COUNTS, "depends on the conversation"),
        (NO_OPENING, "add_generation_prompt"),
        (NO_END, "no token of its own"),
        (REFUSES, "no system"),
    ],
)
def test_a_template_that_does_not_fit_is_refused(tmp_path: Path, template: str, told: str) -> None:
    ends = save_chat_model(tmp_path, ChatModel(CHATML, (), template))
    with pytest.raises(ConfigError, match=told):
        open_format(tmp_path, ends)


def test_a_format_that_does_not_fit_the_tokenizer_is_refused(tmp_path: Path) -> None:
    ends = save_chat_model(tmp_path, MODELS["bare_chatml"])
    with pytest.raises(ConfigError, match="lacks"):
        open_format(tmp_path, ends, "llama3")
    with pytest.raises(ConfigError, match="did you mean 'chatml'"):
        open_format(tmp_path, ends, "chatmll")


CALCULATOR: Tool = {
    "type": "function",
    "function": {"name": "calculator", "parameters": {"type": "object", "properties": {"expression": {}}}},
}
COMPACT = AgentFormatOptions(call_begin="[", call_end="]")
SUM: Message = {"role": "user", "content": "^4*5+2="}


def test_a_model_of_characters_calls_a_calculator(tmp_path: Path) -> None:
    ends = save_character_model(tmp_path)
    chat, tokenizer = open_format(tmp_path, ends, options=COMPACT), AutoTokenizer.from_pretrained(tmp_path)

    def encode(text: str) -> list[int]:
        return list(tokenizer(text).input_ids)

    assert chat.name == "plain"
    assert chat.stop_token_ids == (*ends, *encode("]"))
    prompt, sampled = chat.render([SUM], [CALCULATOR]), encode("so [4*5]")
    assert prompt == encode("^4*5+2=")
    read = chat.parse(sampled, [CALCULATOR])
    assert read.content == "so "
    assert [(call.name, call.arguments) for call in read.tool_calls] == [("calculator", '{"expression": "4*5"}')]
    bridge = chat.bridge([*prompt, *sampled], [found("20")], [CALCULATOR])
    assert bridge == encode("20")
    whole = chat.render([SUM, read.message(), found("20")], [CALCULATOR])
    assert whole == [*prompt, *sampled, *bridge] == encode("^4*5+2=so [4*5]20")
    assert chat.parse([*encode("+2=22#2"), *ends], [CALCULATOR]).message() == {
        "role": "assistant",
        "content": "+2=22#2",
    }
    assert chat.parse(sampled, []).content == "so [4*5]"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (AgentFormatOptions(call_begin="["), "both of"),
        (AgentFormatOptions(call_begin="[", call_end="]]"), "2 tokens"),
        (AgentFormatOptions(call_begin="[", call_end="["), "must differ"),
        (AgentFormatOptions(call_begin="[", call_end="<eos>"), "must differ"),
        (AgentFormatOptions(call_begin="{", call_end="}"), "call_begin"),
        (AgentFormatOptions(tool="calculator"), "neither"),
    ],
)
def test_marks_that_do_not_fit_are_refused(tmp_path: Path, options: AgentFormatOptions, told: str) -> None:
    ends = save_character_model(tmp_path)
    with pytest.raises(ConfigError, match=told):
        open_format(tmp_path, ends, options=options)


@pytest.mark.parametrize(
    ("messages", "tools", "told"),
    [
        ([{"role": "user", "content": "é"}], [], "cannot encode"),
        ([{"role": "user", "content": "<eos>"}], [], None),
        ([SUM, called("{}"), found("1")], [CALCULATOR], "one argument"),
        ([SUM, called('{"a": 1'), found("1")], [CALCULATOR], "one argument"),
        ([SUM, called('{"a": 1}', '{"a": 1}'), found("1")], [CALCULATOR], "one tool call"),
        ([SUM, called('{"a": "1]"}'), found("1")], [CALCULATOR], "end of a call"),
        ([SUM], [CALCULATOR, LOOKUP], "one tool"),
        ([{"role": "system", "content": "add"}, SUM], [], "run into"),
        ([SUM, called('{"a": 12}'), found("1")], [CALCULATOR], None),
    ],
)
def test_what_the_plain_format_refuses(
    tmp_path: Path, messages: list[Message], tools: list[Tool], told: str | None
) -> None:
    ends = save_character_model(tmp_path)
    chat = open_format(tmp_path, ends, options=COMPACT)
    if told is None:
        assert ends[0] not in chat.render(messages, tools)
        return
    with pytest.raises(FormatError, match=told):
        chat.render(messages, tools)


def test_characters_that_a_model_lacks_may_have_a_stand_in(tmp_path: Path) -> None:
    ends = save_character_model(tmp_path)
    options = AgentFormatOptions(call_begin="[", call_end="]", unknown_character="*")
    chat, tokenizer = open_format(tmp_path, ends, options=options), AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.decode(chat.render([{"role": "user", "content": "aÉb"}], [])) == "a*b"
    assert tokenizer.decode(chat.bridge([*chat.render([SUM], []), *ends], [found("É<eos>")], [])) == "*<eos>"


def test_the_marks_of_a_plain_conversation(tmp_path: Path) -> None:
    opened = opened_in(tmp_path, "plain")
    conversation = [ASKED, called('{"word": "it"}'), found("36"), {"role": "assistant", "content": "so"}, ASKED_MORE]
    assert PLAIN.result_end == "."
    text = opened.decode(opened.chat.render(conversation, [LOOKUP]))
    assert text == "<what is it>[it]36.so<eos><and what else>"
