"""Sources, rendering and the cursor: one place gives one prompt, and held-out prompts are never trained."""

import json
import math
import re
import sys
from datetime import date, datetime, timedelta
from decimal import Decimal
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pyarrow
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headway.broker.errors import ConfigError
from headway.learner.config import PromptsConfig, SftPhaseConfig
from headway.learner.data.examples import Example, open_examples
from headway.learner.data.prompts import open_prompts, open_source
from headway.learner.data.prompts.arithmetic import apply
from headway.learner.data.prompts.base import Item, PromptSource, is_held_out
from headway.learner.data.prompts.cursor import PromptCursor
from headway.learner.data.prompts.rendering import Prompts, Renderer
from headway.learner.stages.sft import tokenize

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def character_tokenizer(*, chat: bool = False) -> PreTrainedTokenizerFast:
    vocabulary = {chr(code): code - 32 for code in range(32, 127)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="~", unk_token="?")
    fast.chat_template = CHAT_TEMPLATE if chat else None
    return fast


def prompts_of(seed: int = 0, **config: Any) -> Prompts:
    return open_prompts(PromptsConfig(**config), character_tokenizer(), seed)


def listed(tmp_path: Path, count: int) -> Prompts:
    rows = [{"prompt": f"q{i}", "ground_truth": str(i), "data_source": "test"} for i in range(count)]
    return prompts_of(kind="jsonl", path=str(jsonl(tmp_path, rows)))


def jsonl(tmp_path: Path, rows: list[Any], name: str = "data.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# --- arithmetic


def test_arithmetic_chains_are_right_and_within_bounds() -> None:
    source = open_source(PromptsConfig(kind="arithmetic", options={"min_operations": 3, "max_operations": 4}), seed=1)
    assert source.size is None
    for position in range(200):
        item = source.train(0, position)
        assert isinstance(item.content, str)
        assert re.fullmatch(r"\^\d([-+*]\d){3,4}=", item.content)
        value = int(item.content[1])
        for operator, digit in re.findall(r"([-+*])(\d)", item.content):
            value = apply(value, operator, int(digit))
        assert (item.ground_truth, item.data_source) == (str(value), "arithmetic")


def test_the_known_chain() -> None:
    value = 4
    for operator, digit in (("*", 5), ("*", 8), ("+", 7)):
        value = apply(value, operator, digit)
    assert value == 7


def test_arithmetic_is_random_access_and_depends_on_the_seed() -> None:
    first, again, other = (open_source(PromptsConfig(kind="arithmetic"), seed) for seed in (1, 1, 2))
    backwards = [again.train(2, position) for position in reversed(range(50))]
    assert [first.train(2, position) for position in range(50)] == backwards[::-1]
    assert [other.train(2, position) for position in range(50)] != backwards[::-1]
    assert [first.train(3, position) for position in range(50)] != backwards[::-1]


def test_arithmetic_held_out_prompts_are_never_trained() -> None:
    source = open_source(PromptsConfig(kind="arithmetic", options={"max_operations": 2}), seed=0)
    held_out = {item.content for item in source.held_out(300)}
    assert not held_out & {source.train(0, position).content for position in range(2000)}
    examples = open_examples(SftPhaseConfig(kind="arithmetic", options={"max_operations": 2}), seed=0)
    assert not held_out & {example.query for example in islice(examples, 2000)}
    assert source.held_out(5) == open_source(
        PromptsConfig(kind="arithmetic", options={"max_operations": 2}), 9
    ).held_out(5)


# --- files


def test_jsonl_and_parquet_give_the_same_items(tmp_path: Path) -> None:
    rows = [
        {
            "prompt": "1+1=",
            "ground_truth": "2",
            "data_source": "sums",
            "extra_info": {"level": 1},
            "note": "easy",
        },
        {"prompt": [{"role": "user", "content": "hi"}], "ground_truth": "3", "data_source": "sums"},
    ]
    items = [open_source(PromptsConfig(kind="jsonl", path=str(jsonl(tmp_path, rows))), 0).train(0, i) for i in (0, 1)]
    assert items[0] == Item(
        content="1+1=",
        ground_truth="2",
        data_source="sums",
        extra_info={"note": "easy", "level": 1},
        place=f"{tmp_path / 'data.jsonl'}:1",
    )
    assert items[1].content == [{"role": "user", "content": "hi"}]
    path = tmp_path / "data.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([rows[0]]), path)
    of_parquet = msgspec.structs.replace(items[0], place=f"{path}: row 1")
    assert open_source(PromptsConfig(kind="parquet", path=str(path)), 0).train(0, 0) == of_parquet


EXTRAS: list[dict[str, Any]] = [
    {"extra_info": {"index": 0, "tools_kwargs": {"add": {"a": 1}}}, "unit": None},
    {"extra_info": {"index": 1, "tools_kwargs": {"look": {"deep": {"b": [None, 2]}}}}, "unit": "m"},
]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "datasets"])
def test_nested_mappings_have_the_keys_that_their_row_has(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table's type gives each mapping the keys of all rows; a column without a value says null in each kind."""
    rows = [{"prompt": "a", "ground_truth": "b", **extra} for extra in EXTRAS]
    table, path = pyarrow.Table.from_pylist(rows), tmp_path / f"data.{kind}"
    if kind == "jsonl":
        jsonl(tmp_path, rows)
    parquet.write_table(table, tmp_path / "data.parquet")
    hub = SimpleNamespace(load_dataset=lambda *_, **__: table.to_pylist())
    monkeypatch.setitem(sys.modules, "datasets", hub)
    source = open_source(PromptsConfig(kind=kind, path=str(path)), 0)
    assert [source.train(0, number).extra_info for number in range(2)] == [
        {"unit": extra["unit"], **extra["extra_info"]} for extra in EXTRAS
    ]


@pytest.mark.parametrize("truth", [["Paris, France", 0], 4, 2.5, True, {"a": [1]}, "4", []], ids=repr)
def test_a_ground_truth_has_the_type_of_its_row(tmp_path: Path, truth: Any) -> None:
    row = {"prompt": "a", "ground_truth": truth}
    item = open_source(PromptsConfig(kind="jsonl", path=str(jsonl(tmp_path, [row]))), 0).train(0, 0)
    assert (type(item.ground_truth), item.ground_truth) == (type(truth), truth)


@pytest.mark.parametrize("truth", [Decimal("1.5"), date(2026, 1, 1), [Decimal("1")]], ids=repr)
def test_a_ground_truth_that_would_arrive_as_another_value_is_refused(tmp_path: Path, truth: Any) -> None:
    path = tmp_path / "data.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "a", "ground_truth": truth}]), path)
    with pytest.raises(ConfigError, match=r"data\.parquet: row 1: the ground truth is .* would not reach rewards"):
        open_source(PromptsConfig(kind="parquet", path=str(path)), 0)


def test_verl_rows_and_renamed_fields(tmp_path: Path) -> None:
    verl = {"prompt": "a", "reward_model": {"style": "rule", "ground_truth": "4"}, "data_source": "d"}
    item = open_source(PromptsConfig(kind="jsonl", path=str(jsonl(tmp_path, [verl]))), 0).train(0, 0)
    assert item.ground_truth == "4"
    assert "ground_truth" not in item.extra_info
    path = jsonl(tmp_path, [{"question": "b", "answer": 5}], "gsm.jsonl")
    options = {"prompt_field": "question", "ground_truth_field": "answer"}
    item = open_source(PromptsConfig(kind="jsonl", path=str(path), options=options), 0).train(0, 0)
    assert (item.content, item.ground_truth, item.data_source) == ("b", 5, "gsm")
    assert item.extra_info == {"answer": 5}  # by which rewards made for TRL ask for it


@pytest.mark.parametrize(
    ("row", "column", "truth", "source", "extra"),
    [
        ({"reward_model": {"ground_truth": "4"}, "data_source": "d"}, "answer", "4", "d", {}),
        ({"data_source": "sums"}, "data_source", "sums", "data", {"data_source": "sums"}),
        ({"extra_info": "5", "note": 1}, "extra_info", "5", "data", {"extra_info": "5", "note": 1}),
        ({"answer": "6", "extra_info": {"level": 2}}, "answer", "6", "data", {"answer": "6", "level": 2}),
    ],
)
def test_the_column_of_the_truth_is_one_of_the_others_only_for_rewards(
    tmp_path: Path, row: dict[str, Any], column: str, truth: str, source: str, extra: dict[str, Any]
) -> None:
    path, options = jsonl(tmp_path, [{"prompt": "a", **row}]), {"ground_truth_field": column}
    item = open_source(PromptsConfig(kind="jsonl", path=str(path), options=options), 0).train(0, 0)
    assert (item.ground_truth, item.data_source) == (truth, source)
    assert {name: value for name, value in item.extra_info.items() if name != "reward_model"} == extra


def test_held_out_rows_are_left_out_of_training(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i % 5}", "ground_truth": str(i % 5)} for i in range(8)]
    path = str(jsonl(tmp_path, rows))
    last = {"held_out_rows": 2, "held_out_seed": None}
    source = open_source(PromptsConfig(kind="jsonl", path=path, options=last), 0)
    assert [item.content for item in source.held_out(9)] == ["q1", "q2"]
    assert source.size == 4
    assert [source.train(0, i).content for i in range(4)] == ["q0", "q3", "q4", "q0"]
    other = str(jsonl(tmp_path, rows[:1], "other.jsonl"))
    source = open_source(PromptsConfig(kind="jsonl", path=path, options={"held_out_path": other}), 0)
    assert [item.content for item in source.held_out(1)] == ["q0"]
    assert source.size == 6


def test_held_out_rows_are_drawn_the_same_in_every_run_and_evenly_of_a_sorted_file(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i}", "ground_truth": "1", "data_source": "easy" if i < 500 else "hard"} for i in range(1000)]
    path = str(jsonl(tmp_path, rows))

    def opened(seed: int, **options: Any) -> PromptSource:
        return open_source(PromptsConfig(kind="jsonl", path=path, options={"held_out_rows": 200, **options}), seed)

    source = opened(0)
    held_out = [item.content for item in source.held_out(200)]
    assert len(set(held_out)) == 200 == 1000 - (source.size or 0)
    assert not {source.train(0, place).content for place in range(800)} & set(held_out)
    assert held_out == [item.content for item in opened(7).held_out(200)]
    assert set(held_out) != {item.content for item in opened(0, held_out_seed=1).held_out(200)}
    for count in (40, 200):  # also the first ones, which a smaller evaluation.prompts measures
        easy = sum(item.data_source == "easy" for item in source.held_out(count))
        assert count / 4 < easy < count * 3 / 4


@pytest.mark.parametrize(
    ("differing", "trained"),
    [
        ([{"start": 1}, {"start": 2}, {"start": 3}], 2),
        ([{"extra_info": {"maze": [[1, 0]]}}, {"extra_info": {"maze": [[0, 1]]}}, {"extra_info": {}}], 2),
        ([{"ground_truth": "1"}, {"ground_truth": "2"}, {"ground_truth": "3"}], 2),
        ([{"data_source": "a"}, {"data_source": "b"}, {"data_source": "c"}], 2),
        ([{"a": 1, "b": {"c": 2, "d": 3}}, {"a": 2}, {"b": {"d": 3, "c": 2}, "a": 1}], 1),  # the last equals the first
    ],
)
def test_rows_of_one_prompt_that_differ_elsewhere_are_trained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, differing: list[dict[str, Any]], trained: int
) -> None:
    rows = [{"prompt": "Find the way.", "ground_truth": "", **columns} for columns in differing]
    options = {"held_out_rows": 1, "held_out_seed": None}
    source = open_source(PromptsConfig(kind="jsonl", path=str(jsonl(tmp_path, rows)), options=options), 0)
    assert source.size == trained
    assert f"{trained} of {trained} trained rows" in caplog.text


def test_a_row_of_another_file_is_held_out_by_its_columns_alone(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "ground_truth": "", "at": at} for at in range(3)]
    path, other = str(jsonl(tmp_path, rows)), str(jsonl(tmp_path, rows[1:2], "other.jsonl"))
    source = open_source(PromptsConfig(kind="jsonl", path=path, options={"held_out_path": other}), 0)
    assert [source.train(0, place).extra_info["at"] for place in range(source.size or 0)] == [0, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a", "ground_truth": "b"}\n\n{bad\n', r"data\.jsonl:3: this is no JSON"),
        ('\n{"prompt": "a", "gro\n', r"data\.jsonl:2: this is no JSON from column 21 on: (?!.*line)"),
        ('{"prompt": "a",}\n', r"data\.jsonl:1: this is no JSON from column \d+ on: (?!.*line)"),
        ("{} {}\n", r"data\.jsonl:1: this is no JSON from column 4 on: (?!.*line)"),
        ('{"prompt": "a"}\n', r"no 'ground_truth'; the row has prompt\. .*options\.ground_truth_field=NAME"),
    ],
)
def test_errors_name_the_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        open_source(PromptsConfig(kind="jsonl", path=str(path)), 0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kind": "arithmetic", "options": {"min_operations": "two"}}, r"prompts\.options: Expected `int`"),
        (
            {"kind": "reasoning_gym", "path": "chain_sum", "options": {"terms": 2}},
            "'chain_sum' refuses them: .*terms",
        ),
        (
            {"kind": "reasoning_gym", "path": "chain_sum,leg_counting", "options": {"max_terms": 3}},
            r"prompts\.options: max_terms is 3; with several tasks .* \(chain_sum, leg_counting\)",
        ),
        ({"kind": "no_module:Class"}, r"prompts\.kind: cannot import 'no_module'"),
        ({"kind": "datasets"}, "give the dataset's hub id"),
    ],
)
def test_wrong_recipes_are_told_what_is_wrong(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_source(PromptsConfig(**config), 0)


def test_missing_held_out_prompts_are_told_how_to_get_them(tmp_path: Path) -> None:
    prompts = listed(tmp_path, 3)
    assert prompts.held_out(0) == []
    with pytest.raises(ConfigError, match=r"has none; set .*held_out_rows=N"):
        prompts.held_out(4)


# --- hub, reasoning-gym, one's own


def test_without_the_datasets_library_the_remedy_is_told() -> None:
    try:
        import datasets  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match=r"pip install 'headway\[datasets\]'"):
            open_source(PromptsConfig(kind="datasets", path="openai/gsm8k"), 0)
    else:
        with pytest.raises(ConfigError, match="cannot be loaded"):
            open_source(PromptsConfig(kind="datasets", path="/nowhere/at/all"), 0)


@pytest.mark.parametrize("task", ["chain_sum", "knights_knaves", "game_of_life"])
def test_reasoning_gym_entries_are_scored_after_the_wire(task: str) -> None:
    import reasoning_gym

    first, again = (open_source(PromptsConfig(kind="reasoning_gym", path=task), seed=3) for _ in range(2))
    places = [0, 1, 99, 100, 250]
    items = [first.train(1, position) for position in places]
    assert [again.train(1, position) for position in reversed(places)] == items[::-1]
    assert items != [open_source(PromptsConfig(kind="reasoning_gym", path=task), 4).train(1, p) for p in places]
    scorer = reasoning_gym.create_dataset(task)
    for item in items:
        carried = json.loads(json.dumps(item.extra_info))
        assert (carried["task"], carried["entry"]["question"]) == (task, item.content)
        assert scorer.score_answer(item.ground_truth, carried["entry"]) == 1


def test_reasoning_gym_held_out_entries_are_never_trained() -> None:
    source = open_source(PromptsConfig(kind="reasoning_gym", path="chain_sum"), seed=0)
    held_out = [item.content for item in source.held_out(20)]
    assert len(held_out) == 20
    assert all(isinstance(text, str) and is_held_out(text) for text in held_out)
    assert not any(is_held_out(str(source.train(0, position).content)) for position in range(300))


TWO_TASKS: dict[str, Any] = {
    "kind": "reasoning_gym",
    "path": "chain_sum, leg_counting",
    "options": {"chain_sum": {"min_digits": 2}, "leg_counting": {"max_animals": 4}},
}


def test_several_reasoning_gym_tasks_take_turns() -> None:
    """Each task has its own options and random access; the first held-out prompts are the same for any count."""
    source = open_source(PromptsConfig(**TWO_TASKS), seed=0)
    items = [source.train(0, position) for position in range(40)]
    assert [item.extra_info["task"] for item in items] == ["chain_sum", "leg_counting"] * 20
    assert len({str(item.content) for item in items}) == 40
    assert source.train(0, 7) == items[7] != source.train(1, 7)
    assert {item.extra_info["entry"]["metadata"]["num_digits"] for item in items[::2]} == {2, 3, 4}
    assert max(item.extra_info["entry"]["metadata"]["num_animals"] for item in items[1::2]) == 4
    held_out = source.held_out(9)
    assert len(held_out) == 9
    assert held_out == source.held_out(12)[:9]
    assert {item.data_source for item in held_out} == {"reasoning_gym/chain_sum", "reasoning_gym/leg_counting"}


# --- rendering


def test_text_goes_through_the_tokenizer() -> None:
    prompt = prompts_of(kind="arithmetic").train(0, 5, group="0000-00000005", num_samples=8)
    assert prompt.token_ids == [ord(character) - 32 for character in prompt.text]
    assert (prompt.group, prompt.num_samples) == ("0000-00000005", 8)


def test_messages_go_through_the_chat_template() -> None:
    item = Item(content=[{"role": "user", "content": "hi"}], ground_truth="", data_source="x")
    prompt = Renderer(character_tokenizer(chat=True)).prompt(item, group="g", num_samples=1)
    assert prompt.text == "<user>hi<assistant>"
    assert prompt.token_ids == [ord(character) - 32 for character in prompt.text]
    with pytest.raises(ConfigError, match="no chat template; give prompts as text, a template"):
        Renderer(character_tokenizer()).prompt(item, group="g", num_samples=1)


@pytest.mark.parametrize("held", ["\ud800", 2**64, {"deep": [2**70]}])
def test_an_item_of_any_source_that_cannot_be_sent_is_told(held: Any) -> None:
    item = Item(content="1+1=", ground_truth="2", data_source="mine", extra_info={"note": held})
    with pytest.raises(ConfigError, match=r"prompt g of 'mine': it holds"):
        Renderer(character_tokenizer()).prompt(item, group="g", num_samples=1)


def test_a_row_that_the_tokenizer_refuses_is_found_before_it_is_wanted(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{number}", "ground_truth": ""} for number in range(9)]
    path = jsonl(tmp_path, [*rows, {"prompt": [{"role": "user", "content": "hi"}], "ground_truth": ""}])
    prompts = prompts_of(kind="jsonl", path=str(path))
    with pytest.raises(ConfigError, match=rf"{path}:10: the prompt is a list of messages"):
        prompts.check()
    prompts_of(kind="arithmetic").check()


def lengths(tmp_path: Path, *counts: int) -> Prompts:
    rows = [{"prompt": "q" * count, "ground_truth": ""} for count in counts]
    options = {"held_out_rows": 2, "held_out_seed": None}
    return prompts_of(kind="jsonl", path=str(jsonl(tmp_path, rows)), options=options)


def test_the_longest_prompts_are_checked_before_a_step_meets_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The third row is beyond those that are rendered in order, and is rendered as one of the longest."""
    prompts = lengths(tmp_path, 3, 4, 9, 5, 2, 8)
    prompts.check(9, rows=1)
    assert not caplog.records
    prompts.check(4, rows=1)
    (told,) = caplog.records
    assert "2 of 4 prompts" in told.getMessage()
    assert f"has 9: {tmp_path / 'data.jsonl'}:3" in told.getMessage()
    assert [len(prompt.token_ids) for prompt in prompts.held_out(2, max_tokens=4)] == [2]
    assert "1 of 2 held-out prompts are longer than 4 tokens" in caplog.records[1].getMessage()
    with pytest.raises(ConfigError, match=r"All 4 prompts are longer than 2 tokens; the first is .*data\.jsonl:1"):
        prompts.check(2)


def test_a_system_prompt_makes_text_a_conversation() -> None:
    item = Item(content="2+2=", ground_truth="4", data_source="x")
    prompt = Renderer(character_tokenizer(chat=True), "Be brief.").prompt(item, group="g", num_samples=1)
    assert prompt.text == "<system>Be brief.<user>2+2=<assistant>"
    with pytest.raises(ConfigError, match=r"system_prompt is set, but .* no chat template"):
        Renderer(character_tokenizer(), "Be brief.")


def test_an_empty_prompt_is_refused() -> None:
    item = Item(content="", ground_truth="", data_source="x")
    with pytest.raises(ConfigError, match=r"prompt g of 'x' has no tokens"):
        Renderer(character_tokenizer()).prompt(item, group="g", num_samples=1)


# --- cursor


def cursor_over(prompts: Prompts, **arguments: Any) -> PromptCursor:
    return PromptCursor(prompts, num_samples=4, seed=7, **arguments)


def test_epochs_are_exact_and_shuffled_anew(tmp_path: Path) -> None:
    cursor = cursor_over(listed(tmp_path, 10), epochs=2)
    fed = [*cursor.next(7), *cursor.next(7), *cursor.next(99)]
    assert cursor.is_exhausted
    assert cursor.next(1) == []
    assert [prompt.group for prompt in fed] == [f"{e:04d}-{p:08d}" for e in range(2) for p in range(10)]
    first, second = ([prompt.text for prompt in part] for part in (fed[:10], fed[10:]))
    assert sorted(first) == sorted(second) == sorted(f"q{i}" for i in range(10))
    assert first != second
    assert {prompt.num_samples for prompt in fed} == {4}


def test_without_shuffling_the_files_order_is_kept(tmp_path: Path) -> None:
    cursor = cursor_over(listed(tmp_path, 4), shuffle=False)
    assert [prompt.text for prompt in cursor.next(6)] == ["q0", "q1", "q2", "q3", "q0", "q1"]


def test_an_endless_source_has_one_epoch() -> None:
    cursor = cursor_over(prompts_of(kind="arithmetic"), epochs=1)
    assert [prompt.group for prompt in cursor.next(3)] == ["0000-00000000", "0000-00000001", "0000-00000002"]
    assert not cursor.is_exhausted


@pytest.mark.parametrize("trained", [[], [0], [0, 1, 2], [1, 4], [0, 3, 11, 12], list(range(13)), [12, 0, 5, 5]])
def test_a_resumed_cursor_feeds_exactly_what_is_not_trained(tmp_path: Path, trained: list[int]) -> None:
    prompts = listed(tmp_path, 5)
    cursor = cursor_over(prompts, epochs=4)
    fed = cursor.next(13)
    groups = {fed[number].group for number in trained}
    state = json.loads(json.dumps(cursor.state(groups)))
    resumed = cursor_over(prompts, epochs=4, state=state)
    everything = {prompt.group: prompt for prompt in cursor_over(prompts, epochs=4).next(20)}
    again = resumed.next(99)
    assert [prompt.group for prompt in again] == [group for group in everything if group not in groups]
    assert again == [everything[prompt.group] for prompt in again]
    assert resumed.is_exhausted


def test_the_watermark_passes_what_is_trained_and_forgets_it(tmp_path: Path) -> None:
    prompts = listed(tmp_path, 3)
    cursor = cursor_over(prompts)
    groups = [prompt.group for prompt in cursor.next(6)]
    cursor.mark_trained([groups[1], groups[4]])
    assert cursor.watermark == groups[0]
    of = {"prompts": prompts.digest}
    assert cursor.state() == {"epoch": 0, "position": 0, "trained": [groups[1], groups[4]], **of}
    cursor.mark_trained([groups[0], groups[1]])
    assert cursor.watermark == groups[2]
    cursor.mark_trained([groups[2], groups[3], groups[0]])
    assert cursor.state() == {"epoch": 1, "position": 2, "trained": [], **of}


@pytest.mark.parametrize(
    ("row", "options", "told"),
    [
        ({"ground_truth": "1", "answer": "1", "extra_info": {"answer": "2"}}, {}, "'answer'"),
        ({"answer": "1", "extra_info": {"answer": "1 + 0 = 1"}}, {"ground_truth_field": "answer"}, "'answer'"),
        ({"ground_truth": "1", "index": 3, "extra_info": {"index": "3"}}, {}, "'index'"),
        ({"ground_truth": "1", "tests": [1], "extra_info": {"tests": [1, 2]}}, {}, "'tests'"),
        ({"ground_truth": "1", "index": 3, "extra_info": {"index": 3}}, {}, ""),
        ({"ground_truth": "1", "extra_info": {"prompt": "x", "ground_truth": "2", "data_source": "y"}}, {}, ""),
    ],
    ids=["a column", "the answer's column", "text for a number", "a list", "equal", "given by themselves"],
)
def test_a_column_that_extra_info_hides_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, row: dict[str, Any], options: dict[str, Any], told: str
) -> None:
    path = jsonl(tmp_path, [{"prompt": "q", "ground_truth": "0", "answer": "0"}, {"prompt": "q", **row}])
    item = open_source(PromptsConfig(kind="jsonl", path=str(path), options=options), 0).train(0, 1)
    assert {name: item.extra_info[name] for name in row["extra_info"]} == row["extra_info"]
    warnings = [record.getMessage() for record in caplog.records if "'extra_info'" in record.getMessage()]
    assert len(warnings) == bool(told)
    assert all(warning.startswith(f"1 rows have {told} ") and f"{path}:2" in warning for warning in warnings)


@pytest.mark.parametrize(
    ("value", "is_told"),
    [
        (date(2026, 1, 2), True),
        (datetime(2026, 1, 2, 3), True),
        (Decimal("1.50"), True),
        (timedelta(seconds=4), True),
        ([{"at": date(2026, 1, 2)}], True),
        (math.nan, False),
        (b"ab", False),
        ({"a": [1, None], "b": 0.1}, False),
    ],
)
def test_a_column_that_reaches_rewards_as_text_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, value: Any, is_told: bool
) -> None:
    path = tmp_path / "rows.parquet"
    rows = [{"prompt": "q", "ground_truth": "1", "level": 1, "when": value}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    open_source(PromptsConfig(kind="parquet", path=str(path)), 0)
    assert [f"{path}: row 1" in warning and "'when'" in warning for warning in caplog.messages] == [True] * is_told


ROWS = [{"prompt": f"q{number}", "ground_truth": str(number), "data_source": "test"} for number in range(3)]


@pytest.mark.parametrize(
    "changed",
    [
        [*ROWS, {"prompt": "another", "ground_truth": "1"}],
        ROWS[:-1],
        ROWS[::-1],
        [{**ROWS[0], "ground_truth": "another"}, *ROWS[1:]],
        [{**ROWS[0], "level": 2}, *ROWS[1:]],
        [*ROWS[:-1], {**ROWS[-1], "data_source": "another"}],
    ],
    ids=["a row more", "a row less", "another order", "another answer", "a column more", "another source"],
)
def test_a_place_in_other_prompts_is_refused(tmp_path: Path, changed: list[dict[str, Any]]) -> None:
    def over(rows: list[dict[str, Any]], **state: Any) -> PromptCursor:
        return cursor_over(prompts_of(kind="jsonl", path=str(jsonl(tmp_path, rows))), **state)

    state = json.loads(json.dumps(over(ROWS).state()))
    columns_turned = [dict(reversed(row.items())) for row in ROWS]
    assert over(columns_turned, state=state).position == "0000-00000000"
    with pytest.raises(ConfigError, match=r"^prompts\.path: the prompts have changed"):
        over(changed, state=state)


def test_a_place_without_a_digest_is_of_an_older_version(tmp_path: Path) -> None:
    state = {"epoch": 0, "position": 1, "trained": []}
    assert cursor_over(listed(tmp_path, 3), state=state).position == "0000-00000001"


def test_feeding_and_training_in_turn_after_a_resume_feeds_nothing_twice(tmp_path: Path) -> None:
    prompts = listed(tmp_path, 8)
    cursor = cursor_over(prompts, epochs=1)
    groups = [prompt.group for prompt in cursor.next(8)]
    resumed = cursor_over(prompts, epochs=1, state=cursor.state({groups[1], groups[2], groups[5]}))
    fed = []
    while not resumed.is_exhausted:
        fed += [prompt.group for prompt in resumed.next(1)]
        resumed.mark_trained(fed[-1:])
    assert fed == [groups[i] for i in (0, 3, 4, 6, 7)]


def test_what_is_replayed_before_it_is_fed_is_not_fed(tmp_path: Path) -> None:
    cursor = cursor_over(listed(tmp_path, 8), epochs=1)
    groups = [prompt.group for prompt in cursor_over(listed(tmp_path, 8)).next(8)]
    cursor.mark_trained([groups[0], groups[1], groups[3]])
    assert [prompt.group for prompt in cursor.next(2)] == [groups[2], groups[4]]
    cursor.mark_trained([groups[2], groups[6]])
    assert [prompt.group for prompt in cursor.next(9)] == [groups[5], groups[7]]


def test_feeding_again_after_a_lost_server_gives_the_untrained_once_more(tmp_path: Path) -> None:
    cursor = cursor_over(listed(tmp_path, 8), epochs=1)
    fed = cursor.next(6)
    cursor.mark_trained([fed[0].group, fed[3].group])
    cursor.feed_again()
    assert cursor.next(5)[:4] == [fed[i] for i in (1, 2, 4, 5)]


def test_a_run_whose_every_group_is_trained_resumes_exhausted(tmp_path: Path) -> None:
    prompts = listed(tmp_path, 3)
    cursor = cursor_over(prompts, epochs=1)
    state = cursor.state({prompt.group for prompt in cursor.next(3)})
    assert cursor_over(prompts, epochs=1, state=state).is_exhausted


# --- supervised examples


def test_an_examples_query_has_the_tokens_of_a_prompt() -> None:
    """Otherwise the warm-up would teach responses to prompts that no worker samples from."""
    tokenizer = character_tokenizer(chat=True)
    renderer = Renderer(tokenizer, "Add.")
    prompt = renderer.prompt(Item(content="1+1=", ground_truth="", data_source=""), group="g", num_samples=1)
    trained = tokenize(Example(query="1+1=", response="2"), tokenizer, renderer)
    assert trained.token_ids[: trained.prompt_length].tolist() == prompt.token_ids
    assert trained.token_ids[trained.prompt_length :].tolist() == [ord("2") - 32, tokenizer.eos_token_id]


def examples_of(count: int, seed: int = 0, **config: Any) -> list[Example]:
    return list(islice(open_examples(SftPhaseConfig(**config), seed), count))


def test_worked_examples_are_right() -> None:
    for example in examples_of(200, kind="arithmetic"):
        value, written = int(example.query[1]), example.query[1]
        for operator, digit in re.findall(r"([-+*])(\d)", example.query):
            value = apply(value, operator, int(digit))
            written += f"{operator}{digit}={value}"
        assert example.response == f"{written}#{value}"


def test_careless_examples_err_and_skip_at_their_rates() -> None:
    options = {"error_rate": 0.2, "skip_rate": 0.4}
    examples = examples_of(4000, kind="arithmetic", options=options)
    assert examples == examples_of(4000, kind="arithmetic", options=options)
    assert examples != examples_of(4000, seed=1, kind="arithmetic", options=options)
    skipped = [example for example in examples if re.fullmatch(r"#\d", example.response)]
    assert len(skipped) / len(examples) == pytest.approx(0.4, abs=0.03)
    wrong = steps = 0
    for example in examples:
        before = int(example.query[1])
        for operator, digit, after in re.findall(r"([-+*])(\d)=(\d)", example.response):
            wrong += apply(before, operator, int(digit)) != int(after)
            steps, before = steps + 1, int(after)
    assert wrong / steps == pytest.approx(0.2 * 0.9, abs=0.02)  # a random digit is right once in ten


def test_examples_from_files_are_repeated_in_new_orders(tmp_path: Path) -> None:
    rows = [{"query": f"q{i}", "response": f"r{i}"} for i in range(6)]
    got = examples_of(12, kind="jsonl", path=str(jsonl(tmp_path, rows)))
    expected = [Example(query=f"q{i}", response=f"r{i}") for i in range(6)]
    assert sorted(got[:6], key=str) == sorted(got[6:], key=str) == expected
    assert got[:6] != got[6:]
    path = tmp_path / "data.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert examples_of(12, kind="parquet", path=str(path)) == got


def test_prompts_that_leave_no_room_are_passed_over(tmp_path: Path) -> None:
    rows = [{"prompt": "3" * (20 if i % 3 == 0 else 4), "ground_truth": "", "data_source": ""} for i in range(9)]
    config: dict[str, Any] = {"kind": "jsonl", "path": str(jsonl(tmp_path, rows)), "shuffle": False, "epochs": 1}
    cursor = PromptCursor(prompts_of(**config), num_samples=1, seed=0, shuffle=False, epochs=1, max_prompt_tokens=10)
    groups = [prompt.group for prompt in cursor.next(9)]
    assert groups == [f"0000-{i:08d}" for i in (1, 2, 4, 5, 7, 8)]
    assert cursor.long_prompts == 3
    cursor.mark_trained(groups)
    assert cursor.watermark == "0001-00000000"
    endless = PromptCursor(prompts_of(**config), num_samples=1, seed=0, max_prompt_tokens=3)
    with pytest.raises(ConfigError, match=r"raise engine\.max_model_len"):
        endless.next(1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kind": "arithmetic", "options": {"skip_rate": 2}}, r"sft\.phases\.options: Expected `float` <= 1"),
        (
            {"kind": "reasoning_gym", "path": "chain_sum,leg_count"},
            r"sft\.phases\.path: there are no worked solutions of 'leg_count'; did you mean 'leg_counting'",
        ),
        ({"kind": "jsonl", "options": {"x": 1}}, r"sft\.phases\.options\.x: no such option. Known: none"),
    ],
)
def test_wrong_phases_are_told_what_is_wrong(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_examples(SftPhaseConfig(**config), 0)


def test_wrong_example_rows_name_the_line(tmp_path: Path) -> None:
    path = jsonl(tmp_path, [{"query": "a", "response": "b"}, {"query": "a"}])
    with pytest.raises(ConfigError, match=r"data\.jsonl:2: 'response' must be text; the row has query"):
        open_examples(SftPhaseConfig(kind="jsonl", path=str(path)), 0)
    with pytest.raises(ConfigError, match="has no examples"):
        open_examples(SftPhaseConfig(kind="jsonl", path=str(jsonl(tmp_path, []))), 0)
