"""From what a row says to the tokens that a model gets: one way, right at the borders of texts."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from headway.broker.errors import ConfigError
from headway.learner.config import PromptsConfig, SftPhaseConfig
from headway.learner.data.examples import Example, open_examples
from headway.learner.data.inspection import Inspection
from headway.learner.data.messages import TemplateInputs
from headway.learner.data.prompts import open_prompts
from headway.learner.data.prompts.base import Item
from headway.learner.data.prompts.rendering import Renderer
from headway.learner.data.records import Conversation, LabelledCompletion, Preference, RecordOptions, open_records
from headway.learner.data.records.conversation_renderer import ConversationRenderer
from headway.learner.data.tokenization import ChatTemplate
from headway.learner.models import chat_template
from headway.learner.models.chat_template import RenderWatch, read_chat_template
from headway.learner.stages.sft import tokenize
from headway.rollout_workers.decoding import load_decoding

CHAT = (
    "{{ note }}{% if tools %}<t>{% for t in tools %}{{ t.function | tojson }}{% endfor %}</s>{% endif %}"
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}!{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}</s>"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
CHARACTERS = [chr(code) for code in (10, *range(32, 127))]


def tokenizer_of(
    spaces: str = "", *, front: Sequence[str] = (), behind: Sequence[str] = (), template: str = CHAT
) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each character, and for `4` and `b` with a space before it. `spaces`: how it
    puts a space in front of a text; `front`, `behind`: the tokens that it adds to a text."""
    space = {"bytes": "Ġ", "": " "}.get(spaces, "▁")
    merges = [(space, "4"), (space, "b")]
    known = [*(text if text != " " else space for text in CHARACTERS), space + "4", space + "b"]
    if spaces == "bytes":
        known[0] = "Ċ"
    made = Tokenizer(models.BPE({text: number for number, text in enumerate(known)}, merges))
    if spaces == "normalizer":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif spaces == "bytes":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif spaces:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=spaces, split=False)
    else:
        made.pre_tokenizer = pre_tokenizers.Split("never there", "isolated")
    made.decoder = decoders.Sequence([decoders.Replace(space, " "), decoders.Fuse()])
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<s>", "</s>")])
    added = [(text, made.token_to_id(text)) for text in {*front, *behind}]
    made.post_processor = processors.TemplateProcessing(single=[*front, "$A", *behind], special_tokens=added)
    fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    fast.chat_template = template
    return fast


def tokens_of(tokenizer: PreTrainedTokenizerFast, token_ids: Sequence[int]) -> str:
    """Return the tokens of ids, with a bar between two of them."""
    return "|".join(tokenizer.convert_ids_to_tokens(list(token_ids))).replace("▁", "_").replace("Ġ", "_")


def trained(
    tokenizer: PreTrainedTokenizerFast, conversation: Conversation, renderer: ConversationRenderer | None = None
) -> tuple[str, str]:
    """Return the tokens of a conversation that are context, and those that are trained."""
    made = (renderer or ConversationRenderer(tokenizer, Renderer(tokenizer))).render(conversation)
    assert made is not None
    begin, token_ids = made.prompt_length, made.token_ids.tolist()
    assert all(made.loss_mask[begin:])
    return tokens_of(tokenizer, token_ids[:begin]), tokens_of(tokenizer, token_ids[begin:])


def prompt(tokenizer: PreTrainedTokenizerFast, content: Any, **fields: Any) -> Any:
    item = Item(content=content, ground_truth="", data_source="x", **fields)
    return Renderer(tokenizer).prompt(item, group="g", num_samples=1)


# --- messages of any dialect

USER = {"role": "user", "content": "q"}
CALL = {"name": "add", "arguments": {"a": 1, "b": None}}
WRAPPED = [{"type": "function", "function": CALL}]
OPENAI = [{"id": "1", "type": "function", "function": CALL | {"arguments": json.dumps(CALL["arguments"])}}]
TWICE = [{"function": CALL | {"arguments": json.dumps(json.dumps(CALL["arguments"]))}}]
TOOL = {"role": "tool", "content": "2"}
CALLING = '<u>q</s><a>!add {"a": 1, "b": null}</s><t>2</s><a>'
NO_ARGUMENTS = "<u>q</s><a>!add {}</s><t>2</s><a>"
ADD = {"name": "add", "parameters": {"type": "object"}}
WITH_TOOL = f"<t>{json.dumps(ADD)}</s><u>q</s><a>"
BRIEFLY = "<s>be brief</s><u>q</s><a>"
DIALECTS: list[tuple[Any, dict[str, Any], str]] = [
    ([USER | {"content": [{"type": "text", "text": "q", "image": None}]}], {}, "<u>q</s><a>"),
    ([{"role": "human", "content": "q"}], {}, "<u>q</s><a>"),
    ([{"from": "human", "value": "q"}], {}, "<u>q</s><a>"),
    ([{"from": "system", "value": ""}, {"from": "human", "value": "q"}], {}, "<s></s><u>q</s><a>"),
    (USER, {}, "<u>q</s><a>"),
    (json.dumps([USER]), {}, "<u>q</s><a>"),
    (str([USER]), {}, "<u>q</s><a>"),
    (json.dumps({"from": "human", "value": "q"}), {}, "<u>q</s><a>"),
    (json.dumps(json.dumps([USER])), {}, "<u>q</s><a>"),
    ([USER, {"role": "assistant", "tool_calls": [{"function": {"name": "add"}}]}, TOOL], {}, NO_ARGUMENTS),
    ([USER, {"role": "assistant", "tool_calls": [{"name": "add", "arguments": None}]}, TOOL], {}, NO_ARGUMENTS),
    ([USER, {"role": "model", "content": "b"}, USER], {}, "<u>q</s><a>b</s><u>q</s><a>"),
    ([USER, {"role": "assistant", "content": None, "tool_calls": WRAPPED}, TOOL], {}, CALLING),
    ([USER, {"role": "assistant", "tool_calls": OPENAI, "refusal": None}, TOOL], {}, CALLING),
    ([USER, {"role": "assistant", "content": "", "tool_calls": TWICE}, TOOL], {}, CALLING),
    ([USER, {"role": "assistant", "content": "", "tool_calls": json.dumps(CALL)}, TOOL], {}, CALLING),
    ([USER, {"role": "assistant", "content": None, "function_call": OPENAI[0]["function"]}, TOOL], {}, CALLING),
    ([USER, {"from": "function_call", "value": json.dumps(CALL)}, {"from": "observation", "value": "2"}], {}, CALLING),
    ([USER], {"tools": [{"type": "function", "function": ADD}]}, WITH_TOOL),
    ([USER], {"tools": json.dumps([ADD])}, WITH_TOOL),
    ([USER], {"tools": [json.dumps(ADD)]}, WITH_TOOL),
    ([USER], {"tools": [{"type": "function", **ADD}]}, WITH_TOOL),
    ([USER], {"tools": [{"type": "function", "function": ADD | {"parameters": '{"type": "object"}'}}]}, WITH_TOOL),
    ([USER], {"system": "be brief"}, BRIEFLY),
    ([USER], {"system": [{"type": "text", "text": "be brief"}]}, BRIEFLY),
    ("q", {"system": "be brief"}, BRIEFLY),
    ([{"role": "system", "content": "be brief"}, USER], {"system": "be brief"}, BRIEFLY),
    ([USER], {"system": "", "chat_template_kwargs": {}}, "<u>q</s><a>"),
    ([USER], {"system": None, "chat_template_kwargs": None}, "<u>q</s><a>"),
    ([USER], {"chat_template_kwargs": {"note": "hm "}}, "hm <u>q</s><a>"),
    ([USER], {"chat_template_kwargs": json.dumps({"note": 4})}, "4<u>q</s><a>"),
    ("q", {"system": "be brief", "chat_template_kwargs": {"note": "hm "}}, f"hm {BRIEFLY}"),
    ([USER], {"tools": [ADD], "chat_template_kwargs": {"note": "b"}}, f"b{WITH_TOOL}"),
]


@pytest.mark.parametrize(("content", "columns", "expected"), DIALECTS)
def test_a_prompt_of_any_dialect_is_rendered_as_the_beginning_of_a_record(
    content: Any, columns: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    tokenizer, path = tokenizer_of(), tmp_path / "data.jsonl"
    answer = {"role": "assistant", "content": "b"}
    path.write_text(json.dumps({"prompt": content, "completion": [answer], "ground_truth": "", **columns}) + "\n")
    given = open_prompts(PromptsConfig(kind="jsonl", path=str(path)), tokenizer, 0).train(
        0, 0, group="g", num_samples=1
    )
    assert given.text == expected
    (record,) = open_records(Conversation, str(path), {}, "sft")
    rendered = ConversationRenderer(tokenizer, Renderer(tokenizer)).render(record)
    assert rendered is not None
    assert given.token_ids == rendered.token_ids[: rendered.prompt_length].tolist()


@pytest.mark.parametrize(
    ("content", "columns", "expected"), [each for each in DIALECTS if not each[1] and isinstance(each[0], list)]
)
def test_an_item_of_a_users_own_source_may_have_any_dialect(content: Any, columns: Any, expected: str) -> None:
    assert prompt(tokenizer_of(), content).text == expected


ANSWERED = [USER, {"role": "assistant", "content": "b"}]
TURNS = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "b"}]
ROWS: list[tuple[Any, str, dict[str, Any]]] = [
    (Conversation, "messages", {"messages": ANSWERED}),
    (Conversation, "sharegpt", {"conversations": TURNS}),
    (Conversation, "prompt_completion", {"prompt": "q", "completion": "b"}),
    (Conversation, "query_response", {"query": "q", "response": "b"}),
    (Conversation, "alpaca", {"instruction": "q", "output": "b"}),
    (Preference, "preference", {"prompt": "q", "chosen": "b", "rejected": "c"}),
    (Preference, "ranked", {"prompt": [USER], "responses": ["b", "c"]}),
    (Preference, "scored", {"query": "q", "response": ["c", "b"], "score": [0, 1]}),
    (Preference, "sharegpt_preference", {"conversations": TURNS[:1], "chosen": "b", "rejected": "c"}),
    (Preference, "alpaca_preference", {"instruction": "q", "chosen": "b", "rejected": "c"}),
    (LabelledCompletion, "unpaired", {"prompt": "q", "completion": "b", "label": True}),
    (LabelledCompletion, "messages_labelled", {"messages": ANSWERED, "label": True}),
    (LabelledCompletion, "sharegpt_labelled", {"conversations": TURNS, "kto_tag": True}),
    (LabelledCompletion, "alpaca_labelled", {"instruction": "q", "output": "b", "label": True}),
]


@pytest.mark.parametrize(("kind", "layout", "row"), ROWS, ids=[layout for _, layout, _ in ROWS])
def test_each_layout_gives_its_template_what_a_row_says(
    kind: Any, layout: str, row: dict[str, Any], tmp_path: Path
) -> None:
    tokenizer, path = tokenizer_of(), tmp_path / "data.jsonl"
    given = {"system": "be brief", "tools": [ADD], "chat_template_kwargs": {"note": "hm "}}
    path.write_text(json.dumps(row | given) + "\n")
    (record,) = open_records(kind, str(path), {"format": layout}, "sft")
    conversation = getattr(record, "chosen_conversation", getattr(record, "conversation", record))
    context, answer = trained(tokenizer, conversation)
    expected = f"hm <t>{json.dumps(ADD)}</s>{BRIEFLY}"
    assert context == tokens_of(tokenizer, tokenizer(expected, add_special_tokens=False).input_ids)
    assert answer == "b|</s>"


def test_a_template_with_marks_gets_what_a_row_says() -> None:
    tokenizer = tokenizer_of(
        template=CHAT.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
    )
    given = TemplateInputs(chat_template_kwargs={"note": "hm ", "bos_token": "x"})
    marked = ChatTemplate(tokenizer).marked([USER], "x", given=given)
    assert marked == ("hm <u>q</s>", [(6, 7)])


def test_columns_for_a_template_that_a_text_does_not_reach_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"text": "b", "system": "be brief"}) + "\n")
    with pytest.raises(ConfigError, match=r"data.jsonl:1: 'system' is 'be brief', and the row has a text alone"):
        open_records(Conversation, str(path), {}, "sft")
    for column, value in {"tools": [ADD], "chat_template_kwargs": {"note": "b"}}.items():
        path.write_text(json.dumps({"text": "b", column: value}) + "\n")
        (record,) = open_records(Conversation, str(path), {}, "sft")
        with pytest.raises(ConfigError, match=rf"data.jsonl:1 is text, .* {column!r}"):
            trained(tokenizer_of(), record)
    for column, value in {"system": "s", "tools": [ADD], "chat_template_kwargs": {"note": "b"}}.items():
        path.write_text(json.dumps({"query": "q", "response": "b", column: value}) + "\n")
        with pytest.raises(ConfigError, match=rf"data.jsonl:1: the row has {column!r}, and sft.phases"):
            open_examples(SftPhaseConfig(kind="jsonl", path=str(path)), 0)


def test_what_a_row_gives_its_template_is_shown_by_an_inspection_and_told_to_rewards(tmp_path: Path) -> None:
    tokenizer, path = tokenizer_of(), tmp_path / "data.jsonl"
    row = {"prompt": "q", "ground_truth": "1", "system": "be brief", "chat_template_kwargs": {"note": "hm "}}
    path.write_text(json.dumps(row) + "\n")
    (shown,) = Inspection(str(path), RecordOptions()).examples(tokenizer, Renderer(tokenizer), 1)
    assert shown.pieces == [(f"hm {BRIEFLY}", False)]
    given = open_prompts(PromptsConfig(kind="jsonl", path=str(path), system_prompt="another"), tokenizer, 0).train(
        0, 0, group="g", num_samples=1
    )
    assert given.text == f"hm {BRIEFLY}"  # the row's own message, not the recipe's
    assert given.messages == [{"role": "system", "content": "be brief"}, USER]
    assert given.extra_info == {"system": "be brief", "chat_template_kwargs": {"note": "hm "}}


def test_a_prompt_has_the_tags_that_the_recipe_names(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt": [{"who": "pupil", "says": "q"}], "ground_truth": ""}))
    options = {"tags": {"role_tag": "who", "content_tag": "says", "user_tag": "pupil"}}
    prompts = open_prompts(PromptsConfig(kind="jsonl", path=str(path), options=options), tokenizer_of(), 0)
    assert prompts.train(0, 0, group="g", num_samples=1).text == "<u>q</s><a>"


@pytest.mark.parametrize(
    ("content", "columns", "says"),
    [
        ([{"role": "critic", "content": "q"}], {}, "unknown role|the role 'critic'"),
        ([USER, USER], {}, "'user' follows 'user'"),
        ([{"role": "system", "content": "s"}], {}, "the last one must be"),
        ([USER | {"content": None}], {}, r"prompt\[0\], of the user, is empty"),
        ([USER | {"content": [{"type": "image"}]}], {}, "type 'image'"),
        ([USER, {"role": "assistant", "content": "", "tool_calls": WRAPPED}], {}, "with a call of a function"),
        (
            [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "a=1"}}]}, TOOL],
            {},
            "calls 'add' with the arguments 'a=1'",
        ),
        ([USER], {"tools": ["hammer"]}, "'tools' is"),
        ("q", {"tools": [ADD]}, "into which no chat template writes the 'tools'"),
        ("q", {"chat_template_kwargs": {"note": "b"}}, "into which no chat template writes the 'chat_template_kwargs'"),
        ([USER], {"chat_template_kwargs": "fast"}, "'chat_template_kwargs' is 'fast'"),
        ([USER], {"chat_template_kwargs": {"enable_thinking": False}}, "'enable_thinking'.*does not read it"),
        ([USER], {"chat_template_kwargs": {"add_generation_prompt": False}}, "'add_generation_prompt'.*Headway"),
        ([USER], {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "'chat_template'.*Headway"),
        ([USER], {"chat_template_kwargs": {"messages": []}}, "'messages'.*Headway"),
        ([USER], {"system": 4}, "'system'|system.0. has the content 4"),
        ([{"role": "system", "content": "s"}, USER], {"system": "be brief"}, "'system' is 'be brief', and the first"),
        ([{"role": "developer", "content": "s"}, USER], {"system": "be brief"}, "'system' is 'be brief', and the fir"),
    ],
)
def test_a_prompt_that_is_not_understood_is_refused_by_its_row(
    content: Any, columns: dict[str, Any], says: str, tmp_path: Path
) -> None:
    path = tmp_path / "data.jsonl"
    rows = [{"prompt": "q", "ground_truth": ""}, {"prompt": content, "ground_truth": "", **columns}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match=f"data.jsonl:2: .*({says})"):
        open_prompts(PromptsConfig(kind="jsonl", path=str(path)), tokenizer_of(), 0).check()


@pytest.mark.parametrize(
    "text", ["[1, 2]", '{"a": 1}', '[{"role": 1}]', "[{'role': 'user'", '{"role": "a", "x": 1}', '"a role"']
)
def test_a_text_that_states_no_messages_stays_a_text(text: str) -> None:
    assert prompt(tokenizer_of(), text).text == text


@pytest.mark.parametrize("comment", ["", "{# writes no tools #}"])
def test_tools_that_the_template_does_not_write_are_refused(comment: str) -> None:
    tokenizer = tokenizer_of(template=f"{comment}{{% for m in messages %}}{{{{ m.content }}}}</s>{{% endfor %}}")
    described = [{"type": "function", "function": ADD}]
    with pytest.raises(ConfigError, match="'tools', and the model's chat template does not write them"):
        prompt(tokenizer, [USER], tools=described)
    record = Conversation(prompt=[USER], completion=[USER | {"role": "assistant"}], tools=described, place="a:1")
    with pytest.raises(ConfigError, match="a:1 has 'tools'"):
        trained(tokenizer, record)


SPOKEN = [{"type": "text", "text": "b"}]
CALLS: list[dict[str, Any]] = [USER, {"role": "assistant", "content": "", "tool_calls": WRAPPED}, TOOL]
JSON = '{"a": 1, "b": null}'
SAID = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}"
CALL_FORMS = {
    "mapping": ("{{ c.function.arguments | tojson }}", "{{ m.content }}", JSON),
    "text": ("{{ '' + c.function.arguments }}", "{{ m.content }}", JSON),
    "Python": ("{{ c.function.arguments }}", "{{ m.content }}", JSON),
    "items": ("{% for k, v in c.function.arguments | items %}{{ k }}={{ v | tojson }};{% endfor %}", "", "a=1;b=null;"),
    "null": ("{{ '' + c.function.arguments }}", "{{ m.content if m.content is not none }}", JSON),
}


@pytest.mark.parametrize("form", CALL_FORMS)
def test_a_template_gets_calls_in_the_form_that_it_takes(form: str) -> None:
    arguments, content, expected = CALL_FORMS[form]
    call = f"!{{{{ c.function.name }}}} {arguments}"
    calls = f"{{% for c in m.tool_calls or [] %}}{call}{{% endfor %}}"
    if form == "null":  # writes calls of a message that says nothing
        calls = f"{{% if m.content is none %}}{calls}{{% endif %}}"
    said = SAID.replace(
        "{{ m.content }}", f"{{% if m.tool_calls %}}{content}{{% else %}}{{{{ m.content }}}}{{% endif %}}"
    )
    tokenizer = tokenizer_of(
        template=f"{said}{calls}</s>{{% endfor %}}{{% if add_generation_prompt %}}<a>{{% endif %}}"
    )
    assert prompt(tokenizer, CALLS).text == f"<u>q</s><a>!add {expected}</s><t>2</s><a>"
    record = Conversation(prompt=[USER], completion=[*CALLS[1:], {"role": "assistant", "content": "b"}])
    made = ConversationRenderer(tokenizer, Renderer(tokenizer)).render(record)
    assert made is not None
    assert tokens_of(tokenizer, made.token_ids.tolist()).replace("|", "").endswith("</s><t>2</s><a>b</s>")


@pytest.mark.parametrize(
    ("template", "messages", "says"),
    [
        (f"{SAID}</s>{{% endfor %}}", CALLS, "the call of 'add' of a message of the assistant"),
        (
            f"{SAID}{{{{ m.tool_calls[0].function | tojson if m.tool_calls }}}}</s>{{% endfor %}}",
            [USER, CALLS[1] | {"tool_calls": [*WRAPPED, *WRAPPED]}, TOOL],
            "the call of 'add'",
        ),
        (
            CHAT.replace("{{ m.content }}", "{{ m.content if not m.tool_calls }}"),
            [USER, CALLS[1] | {"content": "b"}, TOOL],
            "the content of a message of the assistant",
        ),
        (
            f"{{% for m in messages if m.role != 'tool' %}}{CHAT.partition('messages %}')[2]}",
            CALLS,
            "the content of a message of the tool",
        ),
        (
            f"{{% for m in messages if m.role != 'developer' %}}{CHAT.partition('messages %}')[2]}",
            [{"role": "developer", "content": "4"}, USER],
            "the content of a message of the developer",
        ),
    ],
)
def test_messages_that_the_template_leaves_out_are_refused(template: str, messages: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=f"the model's chat template does not write {says}"):
        prompt(tokenizer_of(template=template), messages)
    record = Conversation(prompt=messages, completion=[{"role": "assistant", "content": "b"}], place="a:1")
    with pytest.raises(ConfigError, match=f"a:1: the model's chat template does not write {says}"):
        trained(tokenizer_of(template=template), record)


@pytest.mark.parametrize(
    "thought",
    [{"reasoning_content": "hm"}, {"thinking": "hm"}, {"content": [{"type": "reasoning", "text": "hm"}, *SPOKEN]}],
)
def test_a_thought_that_the_template_does_not_read_is_refused(thought: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"messages": [USER, {"role": "assistant", "content": "b"} | thought]}) + "\n")
    (record,) = open_records(Conversation, str(path), {}, "sft")
    with pytest.raises(ConfigError, match=r"data.jsonl:1 has '.*' in a message"):
        trained(tokenizer_of(), record)
    key = "thinking" if "thinking" in thought else "reasoning_content"
    reads = tokenizer_of(template=CHAT.replace("{{ m.content }}", f"{{{{ m.{key} }}}}{{{{ m.content }}}}"))
    assert trained(reads, record) == ("<|u|>|q|</s>|<|a|>", "h|m|b|</s>")


def test_a_template_that_opens_no_answer_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    renderer = Renderer(tokenizer_of(template=CHAT.partition("{% if add_generation_prompt")[0]))
    for _ in range(2):
        assert renderer.render([USER], "a prompt")[0] == "<u>q</s>"
    assert [record.args for record in caplog.records] == [("<a>",)]
    follows = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"  # an answer stands right behind its question
    for template in (CHAT, follows):
        Renderer(tokenizer_of(template=template)).render([USER], "a prompt")
    assert len(caplog.records) == 1


# --- a prompt whose last message is the assistant's


@pytest.mark.parametrize(
    ("template", "begun", "expected"),
    [
        (CHAT, "Let me ", "<u>q</s><a>Let me "),
        (CHAT.replace("{{ m.content }}", "{{ m.content | trim }}"), "Let me ", "<u>q</s><a>Let me"),
        (CHAT, [{"type": "text", "text": "Let"}], "<u>q</s><a>Let"),
    ],
)
def test_the_model_goes_on_with_the_assistants_last_message(template: str, begun: Any, expected: str) -> None:
    found = prompt(tokenizer_of(template=template), [USER, {"role": "assistant", "content": begun}])
    assert found.text == expected
    assert tokens_of(tokenizer_of(), found.token_ids).replace("|", "") == expected


def test_a_begun_answer_with_the_stop_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="ends with the stop token"):
        prompt(tokenizer_of(), [USER, {"role": "assistant", "content": "b</s>"}])


# --- where a text begins and ends


@pytest.mark.parametrize("text", ["1+", "<s>1+"])
@pytest.mark.parametrize("behind", [(), ("</s>",)])
def test_a_text_begins_with_the_front_tokens_once_and_nothing_is_put_behind_it(text: str, behind: Any) -> None:
    tokenizer = tokenizer_of(front=("<s>",), behind=behind)
    assert tokens_of(tokenizer, prompt(tokenizer, text).token_ids) == "<s>|1|+"
    assert trained(tokenizer, Conversation(prompt=text, completion="2")) == ("<s>|1|+", "2|</s>")
    whole = Conversation(prompt="", completion=f"{text}2", trained="all")
    assert trained(tokenizer, whole) == ("<s>", "1|+|2|</s>")


def test_several_front_tokens_are_there_once() -> None:
    tokenizer = tokenizer_of(front=("</s>", "<s>"))
    assert [tokens_of(tokenizer, prompt(tokenizer, text).token_ids) for text in ("1", "</s><s>1")] == ["</s>|<s>|1"] * 2


def test_a_template_and_a_message_that_both_write_bos_make_one() -> None:
    tokenizer = tokenizer_of(front=("<s>",), template="<s>{% for m in messages %}{{ m.content }}{% endfor %}")
    assert tokens_of(tokenizer, prompt(tokenizer, [USER | {"content": "<s>q"}]).token_ids) == "<s>|q"
    assert tokens_of(tokenizer, prompt(tokenizer, [USER]).token_ids) == "<s>|q"


def test_an_end_that_a_text_states_is_not_changed_into_another() -> None:
    tokenizer = tokenizer_of()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<e>"]})
    tokenizer.chat_template = CHAT.replace("</s>", "<e>")  # so both are end tokens
    ended = [trained(tokenizer, Conversation(prompt="2+", completion=f"4{end}"))[1] for end in ("", "</s>", "<e></s>")]
    assert ended == ["4|</s>", "4|</s>", "4|<e>"]
    messages = Conversation(prompt=[USER], completion=[{"role": "assistant", "content": "4</s>"}])
    assert trained(tokenizer, messages)[1] == "4|<e>"


@pytest.mark.parametrize("ended", ["4</s>", "4</s>\n", "4</s></s>", "4"])
def test_what_is_trained_ends_with_one_stop_token(ended: str) -> None:
    tokenizer = tokenizer_of()
    pair = Preference(prompt="2+", chosen=ended, rejected="5")
    judged = LabelledCompletion(prompt="2+", completion=ended, label=True)
    records = [Conversation(prompt="2+", completion=ended), pair.chosen_conversation, judged.conversation]
    assert [trained(tokenizer, record) for record in records] == [("2|+", "4|</s>")] * 3
    assert trained(tokenizer, Conversation(prompt="", completion=f"1{ended}", trained="all")) == ("1", "4|</s>")
    messages = Conversation(prompt=[USER], completion=[{"role": "assistant", "content": ended}])
    assert trained(tokenizer, messages) == ("<|u|>|q|</s>|<|a|>", "4|</s>")
    example = tokenize(Example(query="2+", response=ended), tokenizer, Renderer(tokenizer))
    assert tokens_of(tokenizer, example.token_ids.tolist()) == "2|+|4|</s>"


def test_an_end_token_that_the_template_does_not_write_stays() -> None:
    tokenizer = tokenizer_of(template="{% for m in messages %}{{ m.content }}{% endfor %}")
    messages = Conversation(prompt=[USER], completion=[{"role": "assistant", "content": "4</s>"}])
    assert trained(tokenizer, messages) == ("q", "4|</s>")


# --- where a completion follows a prompt

SPACES = ["always", "first", "never", "normalizer", "bytes"]


@pytest.mark.parametrize("spaces", SPACES)
def test_a_completion_has_the_tokens_of_the_whole_text(spaces: str) -> None:
    tokenizer = tokenizer_of(spaces)
    whole = tokenizer("2+4b", add_special_tokens=False).input_ids
    pair = Preference(prompt="2+", chosen="4b", rejected="bb")
    records = [
        Conversation(prompt="2+", completion="4b"),
        pair.chosen_conversation,
        LabelledCompletion(prompt="2+", completion="4b", label=False).conversation,
    ]
    for record in records:
        context, completion = trained(tokenizer, record)
        assert f"{context}|{completion}" == tokens_of(tokenizer, [*whole, tokenizer.eos_token_id])
        assert completion == "4|b|</s>"


@pytest.mark.parametrize("spaces", ["", *SPACES])
def test_a_token_across_the_border_is_told_and_both_sides_have_their_own(spaces: str) -> None:
    tokenizer = tokenizer_of(spaces)
    renderer = ConversationRenderer(tokenizer, Renderer(tokenizer))
    _, completion = trained(tokenizer, Conversation(prompt="2+ ", completion="4b", place="a:1"), renderer)
    assert completion == "4|b|</s>"
    assert renderer.split.counts == {"split": 1}
    assert renderer.split.first["split"].startswith("a:1")
    _, completion = trained(tokenizer, Conversation(prompt="2+", completion=" 4b"), renderer)
    assert completion == ("_4" if spaces else " 4") + "|b|</s>"
    assert renderer.split.total == 1


@pytest.mark.parametrize("spaces", ["", *SPACES])
def test_turns_whose_border_lies_within_a_token_are_told_and_get_no_space(spaces: str) -> None:
    template = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    tokenizer = tokenizer_of(spaces, template=template)
    renderer = ConversationRenderer(tokenizer, Renderer(tokenizer))
    turns = Conversation(prompt=[USER | {"content": "q "}], completion=[{"role": "assistant", "content": "4b"}])
    assert trained(tokenizer, turns, renderer)[1] == "4|b|</s>"
    assert renderer.split.total == 1


def test_an_inspection_shows_prompts_and_records_as_the_model_gets_them(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    rows = [{"prompt": "2+ ", "completion": "4</s>", "ground_truth": "4"}, {"prompt": "2+", "completion": " 4"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = tokenizer_of("first", front=("<s>",), behind=("</s>",))
    shown = Inspection(str(path), RecordOptions()).examples(tokenizer, Renderer(tokenizer), 2)
    assert [(each.what, each.pieces, each.tokens, bool(each.note)) for each in shown] == [
        ("prompt", [("<s> 2+ ", False)], 5, False),
        ("conversation", [("<s> 2+ ", False), ("4</s>", True)], 7, True),
        ("conversation", [("<s> 2+", False), (" 4</s>", True)], 6, False),
    ]


# --- what an environment says


@pytest.mark.parametrize("spaces", ["", *SPACES])
@pytest.mark.parametrize("says", ["4 b", "</s>4 b", "\nb"])
def test_an_environments_text_has_the_tokens_that_it_has_behind_the_answer(
    spaces: str, says: str, tmp_path: Path
) -> None:
    tokenizer = tokenizer_of(spaces, front=("<s>",), behind=("</s>",))
    tokenizer.save_pretrained(tmp_path)
    stop = tokenizer.eos_token_id
    found = load_decoding(tmp_path, [stop]).encode(says, stop)
    whole = tokenizer("b</s>" + says.removeprefix("</s>"), add_special_tokens=False).input_ids
    assert list(found) == whole[whole.index(stop) + 1 :]


# --- templates that are wrong, or want parts

PARTS = (
    "{% for m in messages %}<{{ m.role[0] }}>{% for part in m.content %}{{ part.text }}{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.mark.parametrize("content", ["q", [{"type": "text", "text": "q"}]])
def test_a_template_that_writes_lists_of_parts_alone_gets_such(content: Any) -> None:
    tokenizer = tokenizer_of(template=PARTS)
    assert prompt(tokenizer, [USER | {"content": content}]).text == "<u>q</s><a>"
    answered = Conversation(prompt=[USER], completion=[{"role": "assistant", "content": "4</s>"}])
    assert trained(tokenizer, answered) == ("<|u|>|q|</s>|<|a|>", "4|</s>")
    begun = [USER | {"content": content}, {"role": "assistant", "content": "4"}]
    assert prompt(tokenizer, begun).text == "<u>q</s><a>4"


LOOPS = "{% for i in range(9999) %}{% for j in range(9999) %}{% for k in range(9999) %}" + 3 * "{% endfor %}"


def test_a_template_that_does_not_end_is_ended_and_named() -> None:
    tokenizer = tokenizer_of(template=LOOPS)
    tokenizer.name_or_path = "/models/mine"
    template = ChatTemplate(tokenizer, RenderWatch(0.2))
    with pytest.raises(ConfigError, match=r"a:1: the model's chat template \(.*/models/mine\) did not end"):
        template.text([USER], "a:1", opens_answer=True)
    tokenizer.chat_template = CHAT
    assert ChatTemplate(tokenizer).text([USER], "a:1", opens_answer=True) == "<u>q</s><a>"


def test_a_template_that_ends_just_then_harms_nobody_else() -> None:
    """The exception that ends a template reaches only the call in which that runs, however late it comes."""
    watch, ends = RenderWatch(0.002), itertools.count()
    outcomes: set[int | str] = set()

    def render() -> int:
        for _ in range(next(ends) * 100):
            pass
        return 1

    for _ in range(300):
        try:
            outcomes.add(watch.run(render, "it"))
        except ConfigError as error:
            outcomes.add(str(error)[:2])
    assert outcomes <= {1, "it"}


def test_a_file_with_a_template_that_does_not_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RenderWatch", lambda: RenderWatch(0.2))
    (tmp_path / "loop.jinja").write_text(LOOPS)
    with pytest.raises(ConfigError, match=r"model\.chat_template: the template in .*loop\.jinja did not end"):
        read_chat_template(str(tmp_path / "loop.jinja"))


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('no users here') }}", "TemplateError: no users here"),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ messages[7].content }}", "UndefinedError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% for i in range(999999) %}{% endfor %}", "OverflowError: Range too big"),
    ],
)
def test_a_template_that_raises_is_told_with_the_row_and_its_message(template: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt": [USER], "ground_truth": ""}))
    prompts = open_prompts(PromptsConfig(kind="jsonl", path=str(path)), tokenizer_of(template=template), 0)
    with pytest.raises(ConfigError, match=rf"data\.jsonl:1: the prompt is a list of messages that .* refuses.*{says}"):
        prompts.check()
