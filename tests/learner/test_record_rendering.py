"""Conversations become tokens with a loss mask that is exact to the token, however a template writes turns."""

from typing import Any

import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headway.broker.errors import ConfigError
from headway.learner.data.examples import Example
from headway.learner.data.prompts.rendering import Renderer
from headway.learner.data.records import Conversation, Preference
from headway.learner.data.records.conversation_renderer import ConversationRenderer, LengthLimit, Rendered
from headway.learner.stages.sft import tokenize

PLAIN = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% if m.role == 'assistant' %}~{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m.role[0] }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}~"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
FORGETFUL = (  # leaves out what the assistant thought in earlier turns
    "{% for m in messages %}<{{ m.role[0] }}>{% if m.role == 'assistant' and loop.last %}(thought){% endif %}"
    "{{ m.content }}{% if m.role == 'assistant' %}~{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
TWO_TURNS = Conversation(
    prompt=[
        {"role": "user", "content": "q1"},
        {"role": "assistant", "content": "a1"},
        {"role": "user", "content": "q2"},
    ],
    completion=[{"role": "assistant", "content": "a2"}],
    trained="assistant",
    place="data.jsonl:7",
)


def tokenizer_of(template: str | None, merges: list[tuple[str, str]] | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each character, and for each of the `merges`."""
    characters = [chr(code) for code in (10, *range(32, 127))]
    vocabulary = {text: number for number, text in enumerate([*characters, *("".join(pair) for pair in merges or [])])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges or []))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("~", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="~", clean_up_tokenization_spaces=False)
    fast.chat_template = template
    return fast


def render(conversation: Conversation, template: str | None, **limit: Any) -> Rendered:
    rendered = renderer_of(template, **limit).render(conversation)
    assert rendered is not None
    return rendered


def renderer_of(template: str | None, **limit: Any) -> ConversationRenderer:
    tokenizer = tokenizer_of(template)
    return ConversationRenderer(tokenizer, Renderer(tokenizer), LengthLimit(**limit))


def marked(rendered: Rendered) -> str:
    """Return the text, with its trained parts in brackets."""
    tokens = tokenizer_of(None).convert_ids_to_tokens(rendered.token_ids.tolist())
    return "".join(
        f"[{token}]" if bit else token for token, bit in zip(tokens, rendered.loss_mask, strict=True)
    ).replace("][", "")


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@pytest.mark.parametrize(
    ("trained", "expected"),
    [
        ("assistant", "<u>q1\n<a>[a1~]\n<u>q2\n<a>[a2~]\n"),
        ("completion", "<u>q1\n<a>a1~\n<u>q2\n<a>[a2~]\n"),
        ("all", "<[u>q1\n<a>a1~\n<u>q2\n<a>a2~]\n"),
    ],
)
def test_trained_turns_begin_after_the_prompt_and_end_with_the_stop_token(
    template: str, trained: Any, expected: str
) -> None:
    conversation = Conversation(prompt=TWO_TURNS.prompt, completion=TWO_TURNS.completion, trained=trained)
    assert marked(render(conversation, template)) == expected


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_it_agrees_with_the_mask_of_transformers_where_the_template_has_marks(template: str) -> None:
    tokenizer, rendered = tokenizer_of(MARKED), render(TWO_TURNS, template)
    assert isinstance(TWO_TURNS.prompt, list)
    assert isinstance(TWO_TURNS.completion, list)
    theirs = tokenizer.apply_chat_template(
        [*TWO_TURNS.prompt, *TWO_TURNS.completion], return_dict=True, return_assistant_tokens_mask=True
    )
    assert rendered.token_ids.tolist() == theirs["input_ids"]
    assert rendered.loss_mask.tolist() == theirs["assistant_masks"]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_a_turn_may_be_context_alone(template: str) -> None:
    assert isinstance(TWO_TURNS.prompt, list)
    first, answer, second = TWO_TURNS.prompt
    prompt = [first, answer | {"trained": False}, second]
    conversation = Conversation(prompt=prompt, completion=TWO_TURNS.completion, trained="assistant")
    assert marked(render(conversation, template)) == "<u>q1\n<a>a1~\n<u>q2\n<a>[a2~]\n"


def test_a_template_that_changes_earlier_turns_is_refused_unless_only_the_last_is_trained() -> None:
    with pytest.raises(ConfigError, match=r"^data\.jsonl:7: .* writes message 2 of 4 otherwise") as it:
        render(TWO_TURNS, FORGETFUL)
    assert "trained: completion" in str(it.value)
    last = Conversation(prompt=TWO_TURNS.prompt, completion=TWO_TURNS.completion)
    assert marked(render(last, FORGETFUL)) == "<u>q1\n<a>a1~\n<u>q2\n<a>[(thought)a2~]\n"


def test_a_template_that_begins_answers_otherwise_than_it_writes_them_is_refused() -> None:
    opens_a_thought = PLAIN.replace("<a>{% endif %}", "<a><think>{% endif %}")
    with pytest.raises(ConfigError, match=r"ends a prompt with '<u>q1\\n<a><think>'.*Put {% generation %}"):
        render(TWO_TURNS, opens_a_thought)


@pytest.mark.parametrize(
    ("trained", "expected"),
    [("assistant", "<u>q1\n<a>[a1]![~]\n<u>q2\n<a>[a2]![~]\n"), ("completion", "<u>q1\n<a>a1!~\n<u>q2\n<a>[a2]![~]\n")],
)
def test_a_template_may_mark_several_parts_of_a_turn(trained: Any, expected: str) -> None:
    template = MARKED.replace("{{ m.content }}~", "{{ m.content }}{% endgeneration %}!{% generation %}~")
    conversation = Conversation(prompt=TWO_TURNS.prompt, completion=TWO_TURNS.completion, trained=trained)
    assert marked(render(conversation, template)) == expected


@pytest.mark.parametrize("behind", ["~", " ~"])
def test_a_stop_token_behind_the_marks_is_trained(behind: str) -> None:
    template = MARKED.replace("~{% endgeneration %}", "{% endgeneration %}" + behind)
    assert "{{ m.content }}{% endgeneration %}" in template
    conversation = Conversation(prompt=TWO_TURNS.prompt, completion=TWO_TURNS.completion, trained="assistant")
    assert marked(render(conversation, template)) == f"<u>q1\n<a>[a1{behind}]\n<u>q2\n<a>[a2{behind}]\n"


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_a_stop_token_that_the_template_does_not_write_is_added_at_the_end(template: str) -> None:
    endless = template.replace("~", "").replace("{{ '\n' }}{% endfor %}", "{% endfor %}")
    conversation = Conversation(prompt=TWO_TURNS.prompt, completion=TWO_TURNS.completion)
    assert marked(render(conversation, endless)) == "<u>q1<a>a1<u>q2<a>[a2~]"
    with pytest.raises(ConfigError, match="no stop token behind an answer, and another message follows"):
        render(Conversation(prompt=TWO_TURNS.prompt, completion=TWO_TURNS.completion, trained="assistant"), endless)


def test_a_template_that_marks_other_parts_than_turns_is_refused() -> None:
    template = MARKED.replace("{% if m.role == 'assistant' %}", "{% if loop.last %}")
    with pytest.raises(ConfigError, match=r"marks 1 parts by {% generation %}, and the conversation has 2 assistant"):
        render(TWO_TURNS, template)


def test_messages_without_a_template_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.jsonl:7 .* has no chat"):
        render(TWO_TURNS, None)


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@pytest.mark.parametrize("merge", [(">", "a"), ("a", "2")])
def test_a_prompt_has_its_own_tokens_where_one_would_lie_across_its_end(template: str, merge: tuple[str, str]) -> None:
    tokenizer = tokenizer_of(template, [merge])
    renderer = Renderer(tokenizer)
    rendered = ConversationRenderer(tokenizer, renderer).render(TWO_TURNS)
    assert rendered is not None
    last = Conversation(prompt=TWO_TURNS.prompt, completion=TWO_TURNS.completion)
    alone = ConversationRenderer(tokenizer, renderer).render(last)
    assert alone is not None
    assert isinstance(TWO_TURNS.prompt, list)
    _, prompt = renderer.render(TWO_TURNS.prompt, "a prompt")
    assert alone.token_ids[: alone.prompt_length].tolist() == prompt
    assert tokenizer.decode(alone.token_ids[alone.prompt_length :]) == "a2~\n"
    assert tokenizer.decode(rendered.token_ids[rendered.loss_mask.astype(bool)]) == "a1~a2~"


@pytest.mark.parametrize("system_prompt", ["", "Be brief."])
def test_a_query_has_the_tokens_that_it_has_as_a_prompt(system_prompt: str) -> None:
    tokenizer = tokenizer_of(PLAIN)
    renderer = Renderer(tokenizer, system_prompt)
    rendered = ConversationRenderer(tokenizer, renderer).render(Conversation(prompt="1+1=", completion="2"))
    assert rendered is not None
    expected = tokenize(Example(query="1+1=", response="2"), tokenizer, renderer)
    assert rendered.token_ids.tolist() == expected.token_ids.tolist()
    assert rendered.prompt_length == expected.prompt_length
    assert rendered.loss_mask[rendered.prompt_length :].tolist() == expected.loss_mask.tolist()


def test_all_of_a_text_is_trained_but_its_first_token() -> None:
    assert marked(render(Conversation(prompt="", completion="text", trained="all"), PLAIN)) == "t[ext~]"
    assert marked(render(Conversation(prompt="q", completion="a", trained="all"), None)) == "q[a~]"


def test_both_sides_of_a_preference_share_the_prompt() -> None:
    pair = Preference(prompt="q=", chosen="1", rejected="23", margin=2.0)
    assert marked(render(pair.chosen_conversation, None)) == "q=[1~]"
    assert marked(render(pair.rejected_conversation, None)) == "q=[23~]"


# --- length


SUM = Conversation(prompt="12345", completion="abc", place="data.jsonl:3")


@pytest.mark.parametrize(
    ("too_long", "max_tokens", "expected"),
    [
        ("refuse", 9, "12345[abc~]"),
        ("cut_end", 7, "12345[ab]"),
        ("cut_prompt", 7, "345[abc~]"),
        ("cut_prompt", 5, "5[abc~]"),
        ("cut_prompt", 4, "5[abc]"),
    ],
)
def test_what_is_too_long_is_cut(too_long: str, max_tokens: int, expected: str) -> None:
    renderer = renderer_of(None, max_tokens=max_tokens, too_long=too_long)
    rendered = renderer.render(SUM)
    assert rendered is not None
    assert marked(rendered) == expected
    assert renderer.cut.counts == ({} if max_tokens == 9 else {"cut": 1})
    assert renderer.skipped.total == 0


@pytest.mark.parametrize(
    ("chosen", "rejected", "max_tokens", "expected"),
    [
        ("a", "bcd", 9, ["12345[a~]", "12345[bcd~]"]),
        ("a", "bcd", 7, ["345[a~]", "345[bcd~]"]),
        ("bcd", "a", 7, ["345[bcd~]", "345[a~]"]),
        ("a", "bc", 3, ["5[a~]", "5[bc]"]),
        ("abcdef", "bcdefa", 8, ["5[abcdef~]", "5[bcdefa~]"]),
    ],
)
def test_both_prompts_of_a_pair_lose_the_same_tokens(
    chosen: str, rejected: str, max_tokens: int, expected: list[str]
) -> None:
    renderer = renderer_of(None, max_tokens=max_tokens, too_long="cut_prompt")
    rendered = renderer.render_together([replace(SUM, completion=completion) for completion in (chosen, rejected)])
    assert [marked(one) for one in rendered if one is not None] == expected


def _said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


TRIMMING = "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] | trim }}{% endfor %}"


@pytest.mark.parametrize(
    ("first", "second", "limits", "template"),
    [
        ("abcd", "abce", {"max_tokens": 8, "too_long": "cut_end"}, None),
        ("abcd", "abcd123", {"max_tokens": 9, "too_long": "cut_end"}, None),
        ("abcd", "abce", {"max_tokens": 4, "too_long": "cut_prompt"}, None),
        ("ab", "ab ", {}, TRIMMING),
        ("ab", "\nab", {}, TRIMMING),
    ],
    ids=["cut before they differ", "cut before the end", "with a prompt that was cut", "trimmed", "trimmed in front"],
)
def test_a_pair_whose_tokens_do_not_differ_is_left_out(
    first: str, second: str, limits: dict[str, Any], template: str | None
) -> None:
    renderer = renderer_of(template, **limits)
    asked = [replace(SUM, completion=completion) for completion in (first, second)]
    if template:
        prompt = [{"role": "user", "content": "q"}]
        asked = [replace(one, prompt=prompt, completion=[_said(str(one.completion))]) for one in asked]
    assert renderer.render_together(asked) == [None, None]
    assert renderer.skipped.counts == {"without a difference": 1}
    assert "data.jsonl:3" in str(renderer.skipped)


@pytest.mark.parametrize(
    ("too_long", "max_tokens", "reason"),
    [("drop", 8, "too long"), ("cut_end", 5, "without a trained token"), ("cut_prompt", 1, "without a trained token")],
)
def test_what_is_left_out_is_counted_by_its_reason(too_long: str, max_tokens: int, reason: str) -> None:
    renderer = renderer_of(None, max_tokens=max_tokens, too_long=too_long)
    assert renderer.render(SUM) is None
    assert renderer.skipped.counts == {reason: 1}
    assert "data.jsonl:3" in str(renderer.skipped)


def test_what_is_too_long_is_refused_by_default() -> None:
    with pytest.raises(ConfigError, match=r"^data\.jsonl:3 has 9 tokens, and max_tokens is 8"):
        renderer_of(None, max_tokens=8).render(SUM)
