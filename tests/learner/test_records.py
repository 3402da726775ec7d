"""Files of every known layout become typed records, each with its place; packages stand in for hubs."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow
import pytest
from pyarrow import feather, parquet

from headway.broker.errors import ConfigError
from headway.learner.data.records import Conversation, LabelledCompletion, Preference, open_records
from headway.learner.data.records.layouts import LAYOUTS

USER, ANSWER, WORSE = (
    {"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "a"), ("assistant", "b"))
)
SYSTEM = {"role": "system", "content": "s"}
HUMAN, GPT, GPT_WORSE = ({"from": name, "value": text} for name, text in (("human", "q"), ("gpt", "a"), ("gpt", "b")))
ALPACA = {"instruction": "q", "input": "", "output": "a"}


def jsonl(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def conversation(**fields: Any) -> Conversation:
    usual: dict[str, Any] = {"prompt": [USER], "completion": [ANSWER], "trained": "assistant"}
    return Conversation(**(usual | fields))


def preference(**fields: Any) -> Preference:
    usual: dict[str, Any] = {"prompt": [USER], "chosen": [ANSWER], "rejected": [WORSE]}
    return Preference(**(usual | fields))


def labelled(**fields: Any) -> LabelledCompletion:
    usual: dict[str, Any] = {"prompt": [USER], "completion": [ANSWER], "label": True}
    return LabelledCompletion(**(usual | fields))


@pytest.mark.parametrize(
    ("layout", "row", "expected"),
    [
        ("messages", {"messages": [USER, ANSWER]}, conversation()),
        ("messages", {"messages": [SYSTEM, USER, ANSWER]}, conversation(prompt=[SYSTEM, USER])),
        ("messages", {"messages": [{**USER, "content": [{"type": "text", "text": "q"}]}, ANSWER]}, conversation()),
        (
            "messages",
            {"messages": [USER, WORSE | {"weight": 0}, USER, ANSWER]},
            conversation(prompt=[USER, WORSE | {"trained": False}, USER]),
        ),
        ("sharegpt", {"conversations": [HUMAN, GPT], "system": "s"}, conversation(prompt=[SYSTEM, USER])),
        (
            "prompt_completion",
            {"prompt": [USER], "completion": [ANSWER]},
            conversation(trained="completion"),
        ),
        ("prompt_completion", {"prompt": "q", "completion": "a"}, Conversation(prompt="q", completion="a")),
        ("prompt_completion", {"prompt": [USER], "response": "a"}, conversation(trained="completion")),
        ("query_response", {"query": "q", "response": "a"}, Conversation(prompt="q", completion="a")),
        ("query_response", {"query": json.dumps([USER]), "response": "a"}, conversation(trained="completion")),
        ("messages", {"messages": json.dumps([USER, ANSWER])}, conversation()),
        ("alpaca", ALPACA, conversation()),
        (
            "alpaca",
            ALPACA | {"input": "i", "system": "s", "history": [["q", "b"]]},
            conversation(prompt=[SYSTEM, USER, WORSE, {"role": "user", "content": "q\ni"}]),
        ),
        ("text", {"text": "a"}, Conversation(prompt="", completion="a", trained="all")),
        (
            "preference",
            {"prompt": "q", "chosen": "a", "rejected": "b"},
            preference(prompt="q", chosen="a", rejected="b"),
        ),
        ("preference", {"prompt": [USER], "chosen": [ANSWER], "rejected": [WORSE]}, preference()),
        ("preference", {"chosen": [USER, ANSWER], "rejected": [USER, WORSE], "margin": 2}, preference(margin=2.0)),
        (
            "preference",
            {
                "prompt": "q",
                "chosen": [USER, ANSWER],
                "rejected": [USER, WORSE],
                "score_chosen": 8,
                "score_rejected": 5.5,
            },
            preference(margin=2.5),
        ),
        (
            "preference",
            {"prompt": [USER], "chosen": [SYSTEM, USER, ANSWER], "rejected": [SYSTEM, USER, WORSE]},
            preference(prompt=[SYSTEM, USER]),
        ),
        (
            "preference",  # both begin with the same answer
            {"prompt": [USER], "chosen": [ANSWER, USER, ANSWER], "rejected": [ANSWER, USER, WORSE]},
            preference(chosen=[ANSWER, USER, ANSWER], rejected=[ANSWER, USER, WORSE]),
        ),
        (
            "preference",
            {"prompt": "q", "chosen": [ANSWER, USER, ANSWER], "rejected": [ANSWER, USER, WORSE]},
            preference(chosen=[ANSWER, USER, ANSWER], rejected=[ANSWER, USER, WORSE]),
        ),
        ("sharegpt_preference", {"conversations": [HUMAN], "chosen": GPT, "rejected": GPT_WORSE}, preference()),
        ("alpaca_preference", {"instruction": "q", "chosen": "a", "rejected": "b"}, preference()),
        ("message_pair", {"chosen_messages": [USER, ANSWER], "rejected_messages": [USER, WORSE]}, preference()),
        ("unpaired", {"prompt": [USER], "completion": [ANSWER], "label": True}, labelled()),
        ("unpaired", {"completion": [USER, ANSWER], "label": False}, labelled(label=False)),
        ("messages_labelled", {"messages": [USER, ANSWER], "label": True}, labelled()),
        ("sharegpt_labelled", {"conversations": [HUMAN, GPT], "kto_tag": True}, labelled()),
        ("alpaca_labelled", ALPACA | {"kto_tag": True}, labelled()),
    ],
)
def test_a_layout_is_told_by_its_columns(
    layout: str, row: dict[str, Any], expected: Conversation | Preference | LabelledCompletion, tmp_path: Path
) -> None:
    path = jsonl(tmp_path / "data.jsonl", row)
    records = open_records(type(expected), path, {}, "sft")
    assert (records.layout, records.rows) == (layout, 1)
    (record,) = records
    assert record.place == f"{path}:1"
    assert _placeless(record) == expected
    assert list(open_records(type(expected), path, {"format": layout}, "sft")) == [record]


def test_every_layout_has_a_case() -> None:
    parametrized: Any = test_a_layout_is_told_by_its_columns
    cases = parametrized.pytestmark[0].args[1]
    names = {layout.name for layouts in LAYOUTS.values() for layout in layouts}
    assert names - {case[0] for case in cases} == {"scored", "ranked"}  # tests below cover these two


def _placeless(record: Any) -> Any:
    return type(record)(**{name: getattr(record, name) for name in record.__struct_fields__ if name != "place"})


def test_scored_responses_become_all_pairs_with_the_gap_as_margin(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "data.jsonl", {"query": "q", "response": ["a", "b", "c", "d"], "score": [1, 3.5, 1, 0]})
    pairs = [(each.chosen, each.rejected, each.margin) for each in open_records(Preference, path, {}, "dpo")]
    assert pairs == [("b", "a", 2.5), ("b", "c", 2.5), ("b", "d", 3.5), ("a", "d", 1.0), ("c", "d", 1.0)]


def test_ranked_responses_become_all_pairs_without_a_margin(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "data.jsonl", {"instruction": "q", "responses": ["a", "b", "c"]})
    pairs = [
        (each.chosen[0]["content"], each.rejected[0]["content"], each.margin)  # type: ignore[index]
        for each in open_records(Preference, path, {}, "dpo")
    ]
    assert pairs == [("a", "b", 0.0), ("a", "c", 0.0), ("b", "c", 0.0)]


def test_a_prompt_with_a_system_message_that_the_pair_lacks_is_refused(tmp_path: Path) -> None:
    row = {"prompt": [SYSTEM, USER], "chosen": [USER, ANSWER], "rejected": [USER, WORSE]}
    with pytest.raises(ConfigError, match="'user' follows 'user'"):
        open_records(Preference, jsonl(tmp_path / "data.jsonl", row), {}, "dpo")


def test_calls_of_functions_become_messages_as_templates_take_them(tmp_path: Path) -> None:
    call = {"name": "add", "arguments": {"a": 1}}
    turns = [
        HUMAN,
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "2"},
        GPT,
    ]
    path = jsonl(tmp_path / "data.jsonl", {"conversations": turns, "tools": json.dumps([{"name": "add"}])})
    (record,) = open_records(Conversation, path, {}, "sft")
    assert record.tools == [{"type": "function", "function": {"name": "add"}}]
    assert record.prompt[1:] == [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": "2"},
    ]


def test_columns_and_roles_of_other_names_are_stated_in_the_recipe(tmp_path: Path) -> None:
    turns = [{"who": "pupil", "says": "q"}, {"who": "teacher", "says": "a"}]
    path = jsonl(tmp_path / "data.jsonl", {"lesson": turns})
    options = {
        "columns": {"conversations": "lesson"},
        "tags": {"role_tag": "who", "content_tag": "says", "user_tag": "pupil", "assistant_tag": "teacher"},
        "trained": "completion",
    }
    (record,) = open_records(Conversation, path, options, "sft")
    assert _placeless(record) == conversation(trained="completion")


# --- files


ROWS = [{"query": "q", "response": "a"}, {"query": "é", "response": "ü\n"}]


def _saved(directory: Path) -> str:
    """Write the files that `datasets` 5 leaves for these rows after `save_to_disk`."""
    directory.mkdir()
    with pyarrow.OSFile(str(directory / "data-00000-of-00001.arrow"), "wb") as file:
        table = pyarrow.Table.from_pylist(ROWS)
        with pyarrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    (directory / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (directory / "dataset_info.json").write_text(json.dumps({"features": {}}))
    return str(directory)


def _saved_splits(directory: Path) -> str:
    directory.mkdir()
    (directory / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))
    _saved(directory / "train")
    return str(directory)


def _written(name: str, text: bytes) -> Callable[[Path], str]:
    def write(directory: Path) -> str:
        directory.mkdir()
        (directory / name).write_bytes(text)
        return str(directory / name)

    return write


def _table(write: Callable[..., Any], name: str) -> Callable[[Path], str]:
    def written(directory: Path) -> str:
        directory.mkdir()
        write(pyarrow.Table.from_pylist(ROWS), str(directory / name))
        return str(directory / name)

    return written


LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


@pytest.mark.parametrize(
    ("write", "places"),
    [
        (_written("a.jsonl", LINES), [":1", ":2"]),
        (_written("a.txt.jsonl", b"\n" + LINES), [":2", ":3"]),
        (_written("bom.jsonl", b"\xef\xbb\xbf" + LINES), [":1", ":2"]),
        (_written("windows.jsonl", LINES.replace(b"\n", b"\r\n")), [":1", ":2"]),
        (_written("a.json", json.dumps(ROWS, indent=1).encode()), [":2", ":6"]),
        (_written("bom.json", b"\xef\xbb\xbf" + json.dumps(ROWS).encode()), [":1", ":1"]),
        (_table(parquet.write_table, "a.parquet"), [": row 1", ": row 2"]),
        (_table(parquet.write_table, "unnamed"), [": row 1", ": row 2"]),
        (_table(feather.write_feather, "a.feather"), [": row 1", ": row 2"]),
        (_saved, ["/data-00000-of-00001.arrow: row 1", "/data-00000-of-00001.arrow: row 2"]),
        (_saved_splits, ["/train/data-00000-of-00001.arrow: row 1", "/train/data-00000-of-00001.arrow: row 2"]),
    ],
)
def test_a_file_is_told_by_its_first_bytes(write: Callable[[Path], str], places: list[str], tmp_path: Path) -> None:
    path = write(tmp_path / "data")
    records = open_records(Conversation, path, {}, "sft")
    assert [(each.prompt, each.completion) for each in records] == [("q", "a"), ("é", "ü\n")]
    assert [each.place.removeprefix(path) for each in records] == places


def test_columns_that_a_table_has_for_other_rows_do_not_count(tmp_path: Path) -> None:
    """A table has all columns in all rows, with no value where a row had none."""
    rows: list[dict[str, Any]] = [
        {"messages": [USER | {"name": "x"}, ANSWER]},
        {"messages": [USER, ANSWER], "tools": "[]", "system": "s"},
    ]
    parquet.write_table(
        pyarrow.Table.from_pylist([{"tools": None, "system": None, **row} for row in rows]), tmp_path / "a"
    )
    first, second = open_records(Conversation, str(tmp_path / "a"), {}, "sft")
    assert first.prompt == [USER | {"name": "x"}]
    assert second.prompt == [SYSTEM, USER]


CALLS: list[dict[str, Any]] = [
    {
        "messages": [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]},
        ],
        "tools": [{"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}],
    }
    for name, arguments, properties in (
        ("weather", {"city": "Oslo"}, {"city": {"type": "string"}}),
        ("add", {"a": 2, "terms": [None, {"b": 3}]}, {"a": {"type": "integer", "enum": [2, None]}}),
    )
]


@pytest.mark.parametrize(
    "write", [_table(parquet.write_table, "a.parquet"), _table(feather.write_feather, "a.feather"), _saved]
)
def test_nulls_that_a_tables_type_puts_into_mappings_are_left_out(
    write: Callable[[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "ROWS", CALLS)
    read = list(open_records(Conversation, write(tmp_path / "data"), {}, "sft"))
    plain = list(open_records(Conversation, jsonl(tmp_path / "a.jsonl", *CALLS), {}, "sft"))
    assert [_told(one) for one in read] == [_told(one) for one in plain]
    assert '"terms": [null, {"b": 3}]' in json.dumps(read[1].completion)  # an item of a list was written by someone


def test_nulls_that_are_written_in_json_stay(tmp_path: Path) -> None:
    row = json.loads(json.dumps(CALLS[0]))
    row["messages"][1]["tool_calls"][0]["function"]["arguments"]["unit"] = None
    (record,) = open_records(Conversation, jsonl(tmp_path / "a.jsonl", row), {}, "sft")
    assert record.completion[0]["tool_calls"][0]["function"]["arguments"]["unit"] is None  # type: ignore[index]


def _told(record: Conversation) -> list[Any]:
    return [record.prompt, record.completion, record.tools]


def test_a_text_file_has_one_record_a_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    assert [each.completion for each in open_records(Conversation, str(tmp_path / "a.txt"), {}, "sft")] == [
        "one",
        "two",
    ]


# --- LLaMA-Factory's description of files


DESCRIPTIONS: dict[str, Any] = {
    "asked": {"file_name": "a.jsonl", "columns": {"prompt": "ask", "response": "say"}},
    "ranked": {
        "file_name": "b.jsonl",
        "formatting": "sharegpt",
        "ranking": True,
        "columns": {"messages": "turns", "chosen": "good", "rejected": "bad"},
    },
    "kto": {
        "file_name": "c.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "turns", "kto_tag": "ok"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "plain": {"file_name": "d.jsonl", "columns": {"prompt": "body"}},
    "pictures": {"file_name": "a.jsonl", "columns": {"images": "images"}},
    "far": {"hf_hub_url": "someone/something"},
}


@pytest.fixture
def factory(tmp_path: Path) -> Path:
    """Return a directory in LLaMA-Factory's layout."""
    (tmp_path / "dataset_info.json").write_text(json.dumps(DESCRIPTIONS))
    jsonl(tmp_path / "a.jsonl", {"ask": "q", "say": "a"})
    jsonl(tmp_path / "b.jsonl", {"turns": [HUMAN], "good": GPT, "bad": GPT_WORSE})
    jsonl(tmp_path / "c.jsonl", {"turns": [USER, ANSWER], "ok": True})
    jsonl(tmp_path / "d.jsonl", {"body": "a"})
    return tmp_path


@pytest.mark.parametrize(
    ("name", "file", "expected"),
    [
        ("asked", "a.jsonl", conversation()),
        ("ranked", "b.jsonl", preference()),
        ("kto", "c.jsonl", labelled()),
        ("plain", "d.jsonl", Conversation(prompt="", completion="a", trained="all")),
    ],
)
def test_a_description_beside_the_files_is_followed(name: str, file: str, expected: Any, factory: Path) -> None:
    by_name = open_records(type(expected), str(factory), {"dataset": name}, "sft")
    by_file = open_records(type(expected), str(factory / file), {}, "sft")
    assert [_placeless(record) for record in (*by_name, *by_file)] == [expected, expected]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("askd", "has no data set 'askd'; did you mean 'asked'?"),
        (
            "",
            "describes several data sets. Set options.dataset (for `headway data inspect`: --dataset) to one of: asked",
        ),
        ("pictures", "the data set 'pictures' has images. Headway trains on text alone."),
        ("far", "the data set 'far' is no file here. Give its id as the path: hf:someone/something."),
        ("ranked", "the layout 'sharegpt_preference' holds preferences. Layouts of conversations: messages, "),
    ],
)
def test_a_description_that_cannot_be_followed_is_refused(name: str, message: str, factory: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        open_records(Conversation, str(factory), {"dataset": name}, "sft")
    assert message in str(raised.value)


# --- hubs


def test_a_dataset_of_the_hugging_face_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Package(ModuleType):
        @staticmethod
        def load_dataset(name: str, subset: str | None, split: str) -> list[Any]:
            asked.append((name, subset, split))
            return ROWS

    monkeypatch.setitem(sys.modules, "datasets", Package("datasets"))
    records = open_records(Conversation, "hf:some/thing", {"split": "test", "subset": "main"}, "sft")
    assert asked == [("some/thing", "main", "test")]
    assert [record.place for record in records] == ["hf:some/thing[test]: row 1", "hf:some/thing[test]: row 2"]


def test_a_dataset_of_modelscope(monkeypatch: pytest.MonkeyPatch) -> None:
    class MsDataset:
        @staticmethod
        def load(name: str, subset_name: str | None, split: str) -> Any:
            return MsDataset()

        def to_hf_dataset(self) -> list[Any]:
            return ROWS

    package = ModuleType("modelscope.msdatasets")
    monkeypatch.setattr(package, "MsDataset", MsDataset, raising=False)
    monkeypatch.setitem(sys.modules, "modelscope", ModuleType("modelscope"))
    monkeypatch.setitem(sys.modules, "modelscope.msdatasets", package)
    records = open_records(Conversation, "modelscope:some/thing", {}, "sft")
    assert [record.prompt for record in records] == ["q", "é"]


@pytest.mark.parametrize(
    ("path", "package", "install"),
    [
        ("hf:some/thing", "datasets", "pip install 'headway[datasets]'"),
        ("modelscope:some/thing", "modelscope", "pip install 'modelscope[dataset]'"),
    ],
)
def test_a_hub_without_its_package(path: str, package: str, install: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=r"sft\.path: .* needs the `\w+` package") as raised:
        open_records(Conversation, path, {}, "sft")
    assert install in str(raised.value)


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    class Package(ModuleType):
        @staticmethod
        def load_dataset(name: str, subset: str | None, split: str) -> list[Any]:
            raise ConnectionError("no route to the hub")

    monkeypatch.setitem(sys.modules, "datasets", Package("datasets"))
    with pytest.raises(ConfigError, match="no route to the hub") as raised:
        open_records(Conversation, "hf:some/thing", {}, "sft")
    assert "export the data to a file" in str(raised.value)
