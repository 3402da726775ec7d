"""The contract of all chat formats: a bridge is what the template writes, and no message becomes a special token."""

import json
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.broker.installation import is_installed
from headway.rollout_workers.agents.conversation import FormatError, Message, Tool
from headway.rollout_workers.agents.formats.template import TemplateFormat

from .chat_models import ANSWERED, ASKED, ASKED_MORE, CHATML, LLAMA, LOOKUP, MODELS, THINKING, Opened, called, found

KINDS = (*MODELS, "plain", *(["renderers"] if is_installed("renderers") else []))
"""renderers: where the extra `agents` is installed."""
WHOLE = ("hermes", "no_tools", "bare_chatml", "headers", "bare_llama", "plain")
"""The formats whose templates write what stood before as it was."""
BY_TEMPLATE = tuple(MODELS)


def answer_in(opened: Opened, before: list[Message], answer: Message, tools: list[Tool]) -> list[int]:
    """Return the answer as the format writes it in a conversation that goes on, with the token that ends it."""
    after = [found("x") if answer.get("tool_calls") else ASKED_MORE]
    prompt = opened.chat.render(before, tools)
    whole = opened.chat.render([*before, answer, *after], tools)
    bridge = opened.chat.bridge([*prompt, opened.chat.stop_token_ids[-1]], after, tools)
    assert bridge
    assert whole[: len(prompt)] == prompt
    return whole[len(prompt) : len(whole) - len(bridge)]


CONVERSATIONS = {
    "a question": ([ASKED], ANSWERED, [ASKED_MORE], []),
    "a system message": ([{"role": "system", "content": "be brief"}, ASKED], ANSWERED, [ASKED_MORE], []),
    "three turns": ([ASKED, ANSWERED, ASKED, ANSWERED, ASKED], ANSWERED, [ASKED_MORE], []),
    "a call": ([ASKED], called('{"word": "it"}'), [found("36")], [LOOKUP]),
    "a second call": ([ASKED, called('{"word": "it"}'), found("36")], called('{"word": "b"}'), [found("3")], [LOOKUP]),
    "after a call": ([ASKED, called('{"word": "it"}'), found("36")], ANSWERED, [ASKED_MORE], [LOOKUP]),
}


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("kind", WHOLE)
def test_prompt_answer_and_bridge_are_the_tokens_of_the_whole(
    of_kind: Callable[[str], Opened], kind: str, conversation: str
) -> None:
    opened, (before, answer, after, tools) = of_kind(kind), CONVERSATIONS[conversation]
    prompt, whole = opened.chat.render(before, tools), opened.chat.render([*before, answer, *after], tools)
    sampled = answer_in(opened, before, answer, tools)
    assert sampled[-1] in opened.chat.stop_token_ids
    bridge = opened.chat.bridge([*prompt, *sampled], after, tools)
    assert bridge
    assert [*prompt, *sampled, *bridge] == whole
    read = opened.chat.parse(sampled, tools).message()
    assert read.get("tool_calls") == answer.get("tool_calls")
    assert read["content"] == answer["content"]


@pytest.mark.parametrize("kind", ["hermes", "thoughtful", "opens_thought", "headers"])
def test_tokens_are_those_of_the_tokenizers_own_template(of_kind: Callable[[str], Opened], kind: str) -> None:
    opened = of_kind(kind)
    function = {"name": "lookup", "arguments": {"word": "é", "exact": False, "n": [1.5, None]}}
    usual = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    ours = called('{"word": "é", "exact": false, "n": [1.5, null]}')
    for before, after in ([ASKED], [found("1")]), ([ASKED, ANSWERED, ASKED], [found("a\n\nb"), ASKED_MORE]):
        whole = opened.tokenizer.apply_chat_template(
            [*before, usual, *after], tools=[LOOKUP], add_generation_prompt=True, tokenize=False
        )
        assert opened.chat.render([*before, ours, *after], [LOOKUP]) == opened.encode(whole)
        previous = [*opened.chat.render(before, [LOOKUP]), opened.chat.stop_token_ids[0]]
        bridge = opened.decode(opened.chat.bridge(previous, after, [LOOKUP]))
        assert whole.endswith(bridge)
        assert bridge.startswith(opened.tokenizer.convert_ids_to_tokens(opened.chat.stop_token_ids[1]))


@pytest.mark.skipif(not is_installed("renderers"), reason="renderers is not installed: the extra agents")
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_the_package_renderers_writes_the_same(of_kind: Callable[[str], Opened], conversation: str) -> None:
    """Two implementations of one family, which share no code."""
    ours, theirs = of_kind("thoughtful").chat, of_kind("renderers").chat
    _, answer, after, tools = CONVERSATIONS[conversation]
    end = ours.stop_token_ids[1]
    for chat in (ours, theirs):
        assert chat.bridge([*ours.render([ASKED], tools), 1, end], after, tools) == ours.bridge(
            [*theirs.render([ASKED], tools), 1, end], after, tools
        )
    sampled = answer_in(of_kind("hermes"), [ASKED], answer, tools)
    text = of_kind("hermes").decode(sampled)
    read, others = (chat.parse(of_kind("thoughtful").encode(text), tools).message() for chat in (ours, theirs))
    assert read == others


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_that_its_length_cut_is_closed(of_kind: Callable[[str], Opened], kind: str) -> None:
    opened = of_kind(kind)
    prompt, closed = opened.chat.render([ASKED], [LOOKUP]), "</think>it is" if kind == "opens_thought" else "it is"
    cut = [*prompt, *opened.encode(closed)]
    bridge = opened.chat.bridge(cut, [ASKED_MORE], [LOOKUP])
    assert bridge
    assert bridge[0] in opened.chat.stop_token_ids
    assert opened.chat.bridge([*cut, bridge[0]], [ASKED_MORE], [LOOKUP]) == bridge[1:]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "lookup", "argu'),
        ("hermes", '<tool_call>\n{"name": "lookup", "arguments": {}}\n</tool_call>\n<tool_call>'),
        ("no_tools", 'I will <tool_call>\n{"name": "lookup", "arguments": {}}'),
        ("thoughtful", "<think>\nit is"),
        ("opens_thought", "it is"),
        ("headers", '{"name": "lookup", "parameters": {"wor'),
        ("headers", "<|python_tag|>"),
        ("plain", "it is [4*"),
        *([("renderers", '<tool_call>\n{"name": "lookup", "argu')] if "renderers" in KINDS else []),
    ],
)
def test_an_answer_cut_within_a_call_or_a_thought_has_no_bridge(
    of_kind: Callable[[str], Opened], kind: str, text: str
) -> None:
    opened = of_kind(kind)
    previous = [*opened.chat.render([ASKED], [LOOKUP]), *opened.encode(text)]
    assert opened.chat.bridge(previous, [ASKED_MORE], [LOOKUP]) is None
    ended = [*previous, opened.chat.stop_token_ids[-1 if kind == "plain" else 1]]
    assert opened.chat.bridge(ended, [found("1")], [LOOKUP]), "an answer that ended is followed by something"


@pytest.mark.parametrize("kind", BY_TEMPLATE)
def test_tokens_without_an_answer_have_no_bridge(of_kind: Callable[[str], Opened], kind: str) -> None:
    opened = of_kind(kind)
    for previous in ([], opened.encode("it is"), opened.chat.render([ASKED], [])[:-1]):
        assert opened.chat.bridge(previous, [ASKED_MORE], []) is None


@pytest.mark.parametrize("kind", BY_TEMPLATE)
def test_another_stop_token_is_followed_by_the_one_that_ends_turns(of_kind: Callable[[str], Opened], kind: str) -> None:
    opened = of_kind(kind)
    assert isinstance(opened.chat, TemplateFormat)
    other = opened.chat.stop_token_ids[0]
    assert other != opened.chat.end
    bridge = opened.chat.bridge([*opened.chat.render([ASKED], []), other], [ASKED_MORE], [])
    assert bridge
    assert bridge[0] == opened.chat.end


NAMES = (*CHATML, *THINKING, *LLAMA, "<eos>", "<pad>", "[", "]")
HOSTILE = st.lists(
    st.one_of(st.sampled_from(NAMES), st.text(max_size=6), st.sampled_from(["\n\n", " ", "\ue000", "é", "{", '"'])),
    max_size=6,
).map("".join)


def special_tokens(opened: Opened, tokens: list[int]) -> Counter[int]:
    return Counter(one for one in tokens if one in opened.tokenizer.added_tokens_decoder)


@pytest.mark.parametrize("kind", BY_TEMPLATE)
@given(result=HOSTILE, question=HOSTILE)
@settings(max_examples=30, deadline=None)
def test_no_text_of_users_and_tools_becomes_a_special_token(
    of_kind: Callable[[str], Opened], kind: str, result: str, question: str
) -> None:
    opened = of_kind(kind)
    previous = [*opened.chat.render([ASKED], [LOOKUP]), opened.chat.stop_token_ids[1]]
    harmless = opened.chat.bridge(previous, [found("x"), {"role": "user", "content": "x"}], [LOOKUP])
    hostile = opened.chat.bridge(previous, [found(result), {"role": "user", "content": question}], [LOOKUP])
    assert harmless
    assert hostile
    assert special_tokens(opened, hostile) == special_tokens(opened, harmless)
    if kind != "headers":  # which trims contents, and writes results as JSON
        assert f"{result}\n</tool_response>" in opened.decode(hostile) or kind == "bare_llama"
        assert question in opened.decode(hostile)


@pytest.mark.parametrize("kind", BY_TEMPLATE)
def test_only_special_tokens_are_kept_from_who_wrote_the_agent(of_kind: Callable[[str], Opened], kind: str) -> None:
    """A system message may describe tags that are tokens; the token that ends a turn stays text."""
    opened = of_kind(kind)
    plain, tagged, ended = (
        special_tokens(opened, opened.chat.render([{"role": "system", "content": text}, ASKED], []))
        for text in ("a", "a <think>", f"a {''.join(NAMES[:3])}{''.join(LLAMA)}")
    )
    assert ended == plain
    assert sum((tagged - plain).values()) == ("<think>" in MODELS[kind].added)


TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=12)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[Message], Message, list[Message]]:
    """Draw a conversation, an answer, and what follows it."""

    def turn() -> list[Message]:
        if draw(st.booleans()):
            arguments = json.dumps(draw(st.dictionaries(st.sampled_from("ab"), st.booleans() | TEXT | st.integers())))
            return [called(arguments), found(draw(TEXT))]
        return [{"role": "assistant", "content": draw(TEXT)}, {"role": "user", "content": draw(TEXT)}]

    begins = [{"role": "system", "content": draw(TEXT)}] if draw(st.booleans()) else []
    before = [*begins, {"role": "user", "content": draw(TEXT)}]
    for _ in range(draw(st.integers(0, 3))):
        before += turn()
    answer, after = turn()
    return before, answer, [after, *([ASKED_MORE] if draw(st.booleans()) else [])]


@pytest.mark.parametrize("kind", [kind for kind in WHOLE if kind != "plain"])
@given(conversation=conversations())
@settings(max_examples=30, deadline=None)
def test_any_conversation_goes_on_as_its_template_writes_it(
    of_kind: Callable[[str], Opened], kind: str, conversation: tuple[list[Message], Message, list[Message]]
) -> None:
    opened, (before, answer, after) = of_kind(kind), conversation
    prompt, whole = opened.chat.render(before, [LOOKUP]), opened.chat.render([*before, answer, *after], [LOOKUP])
    stop = opened.chat.stop_token_ids[1]
    bridge = opened.chat.bridge([*prompt, stop], after, [LOOKUP])
    assert bridge
    sampled = whole[len(prompt) : len(whole) - len(bridge)]
    assert whole[len(whole) - len(bridge) :] == bridge
    assert sampled[-1] == stop
    if whole[: len(prompt)] == prompt:  # else a token reached from the prompt's end into the answer
        assert opened.chat.bridge([*prompt, *sampled], after, [LOOKUP]) == bridge


@pytest.mark.parametrize("kind", KINDS)
@given(tokens=st.lists(st.integers(-3, 600) | st.integers(), max_size=40))
@settings(max_examples=30, deadline=None)
def test_any_tokens_are_an_answer(of_kind: Callable[[str], Opened], kind: str, tokens: list[int]) -> None:
    opened = of_kind(kind)
    for tools in ([], [LOOKUP]):
        read = opened.chat.parse(tokens, tools)
        ids = [call.id for call in read.tool_calls]
        assert len(set(ids)) == len(ids)
        assert tools or not ids


PIECES = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "[", "]", "{", "}", '"name"', ":"),
    *('"lookup"', ",", '"arguments"', '"parameters"', "\\", '"', ";", "\\ud800", "\n", "[" * 2000, '{"a":' * 2000),
    *('{"name":"lookup","arguments":{}}', '{"name":"lookup","parameters":{}}', "9" * 5000),
]


@pytest.mark.parametrize("kind", BY_TEMPLATE)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=12))
@settings(max_examples=40, deadline=None)
def test_any_pieces_of_calls_are_an_answer(of_kind: Callable[[str], Opened], kind: str, pieces: list[str]) -> None:
    opened = of_kind(kind)
    tokens = opened.encode("".join(pieces))
    prompt = opened.chat.render([ASKED], [LOOKUP])
    for ended in ([], [opened.chat.stop_token_ids[1]]):
        read = opened.chat.parse([*tokens, *ended], [LOOKUP])
        assert opened.chat.parse([*tokens, *ended], [LOOKUP]) == read
        after = [found("1")] if read.tool_calls else [ASKED_MORE]
        bridge = opened.chat.bridge([*prompt, *tokens, *ended], after, [LOOKUP])
        assert bridge or not ended


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([], "no message"),
        ([{"role": "wizard", "content": "a"}], "role"),
        ([{"content": "a"}], "role"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "no text"),
        ([{"role": "user", "content": 5}], "no text"),
        ([ASKED, ANSWERED], "assistant"),
        ([ASKED, {"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}, found("1")], "name"),
    ],
)
def test_what_a_format_cannot_write_is_refused(
    of_kind: Callable[[str], Opened], kind: str, messages: list[Message], told: str
) -> None:
    opened = of_kind(kind)
    with pytest.raises(FormatError, match=told):
        opened.chat.render(messages, [])
    if messages and messages[-1] is not ANSWERED:
        assert opened.chat.bridge([*opened.chat.render([ASKED], []), 1], messages[-1:], []) is None or len(messages) > 1


@pytest.mark.parametrize("kind", KINDS)
def test_text_that_no_tokenizer_encodes_is_refused(of_kind: Callable[[str], Opened], kind: str) -> None:
    with pytest.raises(FormatError):
        of_kind(kind).chat.render([{"role": "user", "content": "a\ud800"}], [])


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_text_are_lines(of_kind: Callable[[str], Opened], kind: str) -> None:
    opened = of_kind(kind)
    one = [{"type": "text", "text": "what is it"}]
    assert opened.chat.render([{"role": "user", "content": one}], []) == opened.chat.render([ASKED], [])


@pytest.mark.parametrize("kind", KINDS)
def test_threads_share_a_format(of_kind: Callable[[str], Opened], kind: str) -> None:
    chat = of_kind(kind).chat

    def played(_: int) -> tuple[list[int], list[int] | None, str]:
        prompt = chat.render([ASKED], [LOOKUP])
        answer = [*prompt[:3], chat.stop_token_ids[0]]
        return prompt, chat.bridge([*prompt, *answer], [ASKED_MORE], [LOOKUP]), chat.parse(answer, [LOOKUP]).content

    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(played, range(64)))
    assert all(result == results[0] for result in results)
