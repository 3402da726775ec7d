"""Broken data files: each is refused with file and line, or skipped and counted where the recipe says so."""

import gzip
import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pytest
from pyarrow import parquet

from headway.broker.errors import ConfigError
from headway.learner.data.records import Conversation, LabelledCompletion, Preference, Records, open_records

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
TOOL = {"role": "tool", "content": "4"}
GOOD: dict[type, dict[str, Any]] = {
    Conversation: {"messages": [USER, ANSWER]},
    Preference: {"prompt": "q", "chosen": "a", "rejected": "b"},
    LabelledCompletion: {"prompt": "q", "completion": "a", "label": True},
}


class Broken(NamedTuple):
    """A second line after a good one, or a whole file, and the words that the error must hold."""

    name: str
    kind: type
    content: Any
    says: str
    file: str = "data.jsonl"


def turns(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages)}


def parquet_bytes() -> bytes:
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist([GOOD[Preference]] * 100), sink)
    return bytes(sink.getvalue())


ROWS = [
    Broken("missing column", Preference, {"prompt": "q", "chosen": "a"}, "there is no 'rejected'; the row has prompt"),
    Broken("missing label", LabelledCompletion, {"prompt": "q", "completion": "a"}, "there is no 'label'"),
    Broken("a number for text", Preference, {"prompt": "q", "chosen": 1, "rejected": "b"}, "'chosen' is 1"),
    Broken("null for text", Preference, {"prompt": "q", "chosen": None, "rejected": "b"}, "no 'chosen'"),
    Broken("empty response", Preference, {"prompt": "q", "chosen": " ", "rejected": "b"}, "'chosen' is empty"),
    Broken(
        "empty answer", Conversation, turns(USER, ANSWER | {"content": ""}), "messages[1], of the assistant, is empty"
    ),
    Broken("empty question", Conversation, turns(USER | {"content": ""}, ANSWER), "messages[0], of the user, is empty"),
    Broken("no messages", Conversation, turns(), "'messages' is []"),
    Broken("messages that are text", Conversation, {"messages": "q and a"}, "'messages' is 'q and a'"),
    Broken("no role", Conversation, turns({"content": "q"}, ANSWER), "messages[0] is {'content': 'q'}"),
    Broken("unknown role", Conversation, turns(USER, {"role": "bot", "content": "a"}), "the role 'bot'"),
    Broken("two users", Conversation, turns(USER, USER, ANSWER), "'user' follows 'user'"),
    Broken("two answers", Conversation, turns(USER, ANSWER, ANSWER), "'assistant' follows 'assistant'"),
    Broken("answer first", Conversation, turns(ANSWER, USER, ANSWER), "'assistant' follows 'system'"),
    Broken("late system", Conversation, turns(USER, ANSWER, USER | {"role": "system"}, ANSWER), "'system' follows"),
    Broken("tool unasked", Conversation, turns(USER, TOOL, ANSWER), "'tool' follows 'user'"),
    Broken("unanswered", Conversation, turns(USER, ANSWER, USER), "the last one must be an assistant's"),
    Broken("a picture", Conversation, turns(USER | {"content": [{"type": "image"}]}, ANSWER), "type 'image'"),
    Broken("pictures", Conversation, turns(USER, ANSWER) | {"images": ["a.png"]}, "it has images"),
    Broken("half a weight", Conversation, turns(USER, ANSWER | {"weight": 0.5}), "has the weight 0.5"),
    Broken("half a character", Conversation, turns(USER, ANSWER | {"content": "a\ud800"}), "half of a character"),
    Broken("no list of tools", Conversation, turns(USER, ANSWER) | {"tools": "add"}, "'tools' is 'add'"),
    Broken("no difference", Preference, {"prompt": "q", "chosen": "a", "rejected": "a"}, "equals the rejected"),
    Broken("no prompt", Preference, {"chosen": "a", "rejected": "b"}, "there is no 'prompt'"),
    Broken(
        "two prompts",
        Preference,
        {"chosen": [USER, ANSWER], "rejected": [USER | {"content": "r"}, ANSWER]},
        "have their first 0 messages in common",
    ),
    Broken(
        "no difference in whole conversations",
        Preference,
        {"chosen": [USER, ANSWER], "rejected": [USER, ANSWER]},
        "nothing to prefer",
    ),
    Broken(
        "NaN for a margin",
        Preference,
        {"prompt": "q", "chosen": "a", "rejected": "b", "margin": float("nan")},
        "'margin' has nan",
    ),
    Broken("a word for a label", LabelledCompletion, GOOD[LabelledCompletion] | {"label": "yes"}, "'label' is 'yes'"),
    Broken("a number for a label", LabelledCompletion, GOOD[LabelledCompletion] | {"label": 1}, "'label' is 1"),
]


def scored(name: str, response: Any, score: Any, says: str) -> Broken:
    lines = [
        {"query": "q", "response": ["a", "b"], "score": [1, 2]},
        {"query": "q", "response": response, "score": score},
    ]
    return Broken(name, Preference, "".join(json.dumps(line) + "\n" for line in lines).encode(), says)


SCORED = [
    scored("one score", ["a", "b"], [1.0], "'response' has 2 items, and 'score' has 1"),
    scored("a score for all", ["a", "b"], 3, "'score' has 3"),
    scored("one response", ["a"], [1], "'response' is ['a']"),
    scored("a response for all", "a", [1], "'response' is 'a'"),
    scored("NaN for a score", ["a", "b"], [1, float("nan")], "'score' has nan"),
    scored("text for a score", ["a", "b"], [1, "2"], "'score' has '2'"),
    scored("equal scores", ["a", "b"], [1, 1], "no two responses differ"),
    scored("an empty response of two", ["a", ""], [1, 2], "'response' has the item ''"),
]
LINE = json.dumps(GOOD[Conversation]).encode()
LINES = [
    Broken("no JSON", Conversation, LINE + b"\n{'messages': 1}\n", "this is no JSON"),
    Broken("cut off", Conversation, LINE + b"\n" + LINE[:20], "this is no JSON"),
    Broken("a list in a line", Conversation, LINE + b"\n[1]\n", "this is a list"),
    Broken("Latin-1", Conversation, LINE + b'\n{"text": "\xe9"}\n', "byte 11 of the line, b'\\xe9', is no UTF-8"),
    Broken("NUL bytes", Conversation, LINE + b"\n" + bytes(8) + b"\n", "byte 1 of the line is NUL"),
    Broken(
        "a line of 10 MB",
        Conversation,
        LINE + b'\n{"text": "' + b"x" * 10000000 + b'"}\n',
        "the line has 10,000,013 bytes, and the longest that is read has 8,000,000",
    ),
    Broken("nested too deep", Conversation, LINE + b'\n{"a": ' + b"[" * 100000 + b"\n", "too many brackets"),
]
FILES = [
    Broken("empty", Conversation, b"", "is empty"),
    Broken("blank", Conversation, b"\n \n", "is empty"),
    Broken("gzip", Conversation, gzip.compress(LINE), "is packed by gzip"),
    Broken("UTF-16", Conversation, LINE.decode().encode("utf-16"), "is in UTF-16"),
    Broken("a web page", Conversation, b"<!DOCTYPE html>", "a page of HTML"),
    Broken("a pointer", Conversation, b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS"),
    Broken("a cut list", Conversation, b"[\n" + LINE + b",\n" + LINE[:9], "data.jsonl:3: the list is no JSON"),
    Broken("a list in Latin-1", Conversation, b'[\n{"text":\n"\xe9"}]', "data.jsonl:3: byte b'\\xe9' is no UTF-8"),
    Broken("a deep list", Conversation, b"[" * 100000, "too many brackets"),
    Broken("cut Parquet", Preference, parquet_bytes()[:-200], "is no Parquet file, or damaged after row 0"),
    Broken("JSON named Parquet", Conversation, LINE, "does not begin as a parquet file does", file="data.parquet"),
    Broken("prompts of RL", Conversation, b'{"prompt": "q", "reward_model": {}}', "prompts of reinforcement"),
    Broken("of another kind", Conversation, json.dumps(GOOD[Preference]).encode(), "It looks like preferences"),
    Broken("unknown columns", Preference, b'{"x": 1}', "its columns are x"),
    Broken("no rows in a list", Conversation, b"[]", "has no conversations"),
]


@pytest.mark.parametrize("broken", ROWS + SCORED + LINES, ids=lambda broken: broken.name)
def test_a_broken_row_is_named_by_file_and_line(broken: Broken, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        open_records(broken.kind, written(broken, tmp_path), {}, "sft")
    assert str(raised.value).startswith(f"{tmp_path / broken.file}:2: ")
    assert broken.says in str(raised.value)


@pytest.mark.parametrize("broken", ROWS + SCORED + LINES, ids=lambda broken: broken.name)
def test_a_broken_row_is_skipped_and_counted(broken: Broken, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        records: Records[Any] = open_records(broken.kind, written(broken, tmp_path), {"on_bad_row": "skip"}, "sft")
    assert len(records) == 1
    assert (records.rows, list(records.skipped.counts.values())) == (2, [1])
    assert broken.says in caplog.text


@pytest.mark.parametrize("broken", FILES, ids=lambda broken: broken.name)
@pytest.mark.parametrize("on_bad_row", ["refuse", "skip"])
def test_a_broken_file_is_refused_in_any_case(broken: Broken, on_bad_row: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        open_records(broken.kind, written(broken, tmp_path), {"on_bad_row": on_bad_row}, "sft")
    assert str(tmp_path / broken.file) in str(raised.value)
    assert str(raised.value).startswith("sft.path: ")
    assert broken.says in str(raised.value)


def written(broken: Broken, directory: Path) -> str:
    path = directory / broken.file
    if isinstance(broken.content, bytes):
        path.write_bytes(broken.content)
    else:
        path.write_text(f"{json.dumps(GOOD[broken.kind])}\n{json.dumps(broken.content)}\n")
    return str(path)


def test_a_file_of_broken_rows_alone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "q", "chosen": "a", "rejected": "a"}\n' * 3)
    with pytest.raises(ConfigError, match="All 3 rows are broken: 3 whose completions do not differ"):
        open_records(Preference, str(tmp_path / "data.jsonl"), {"on_bad_row": "skip"}, "dpo")


def test_a_layout_follows_most_rows_where_the_first_is_broken(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"x": 1}\n' + (json.dumps(GOOD[Preference]) + "\n") * 2)
    with pytest.raises(ConfigError, match=r"data\.jsonl:1: there is no 'chosen' and no 'rejected'; the row has x"):
        open_records(Preference, str(tmp_path / "data.jsonl"), {}, "dpo")


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("nowhere.jsonl", {}, "'nowhere.jsonl' is no file or directory"),
        ("", {}, "'' is no file or directory"),
        (".", {}, "is a directory without state.json (of a saved data set) or dataset_info.json"),
        ("data.jsonl", {"format": "alpacca"}, "the layout 'alpacca' does not exist; did you mean 'alpaca'?"),
        ("data.jsonl", {"colums": {}}, "sft.options.colums: no such option; did you mean 'columns'?"),
        ("data.jsonl", {"on_bad_row": "ignore"}, "sft.options: Invalid enum value 'ignore'"),
    ],
)
def test_wrong_options_are_refused(
    path: str, options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data.jsonl").write_bytes(LINE)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as raised:
        open_records(Conversation, path, options, "sft")
    assert message in str(raised.value)
