"""Broken data files: each is refused with file, line and remedy, or skipped and counted where the recipe says so."""

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
    remedy: str
    file: str = "data.jsonl"


def row(name: str, kind: type, content: dict[str, Any], says: str, remedy: str) -> Broken:
    return Broken(name, kind, content, says, remedy)


def turns(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages)}


def parquet_bytes() -> bytes:
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist([GOOD[Preference]] * 100), sink)
    return bytes(sink.getvalue())


ROWS = [
    row(
        "missing column",
        Preference,
        {"prompt": "q", "chosen": "a"},
        "there is no 'rejected'; the row has prompt",
        "Add the",
    ),
    row(
        "missing label", LabelledCompletion, {"prompt": "q", "completion": "a"}, "there is no 'label'", "Add the column"
    ),
    row(
        "a number for text",
        Preference,
        {"prompt": "q", "chosen": 1, "rejected": "b"},
        "'chosen' is 1",
        "list of messages",
    ),
    row("null for text", Preference, {"prompt": "q", "chosen": None, "rejected": "b"}, "no 'chosen'", "Add the column"),
    row(
        "empty response",
        Preference,
        {"prompt": "q", "chosen": " ", "rejected": "b"},
        "'chosen' is empty",
        "leave it out",
    ),
    row(
        "empty answer",
        Conversation,
        turns(USER, ANSWER | {"content": ""}),
        "messages[1], of the assistant, is empty",
        "leave",
    ),
    row(
        "empty question",
        Conversation,
        turns(USER | {"content": ""}, ANSWER),
        "messages[0], of the user, is empty",
        "leave",
    ),
    row("no messages", Conversation, turns(), "'messages' is []", "list of messages"),
    row("messages that are text", Conversation, {"messages": "q and a"}, "'messages' is 'q and a'", "list of messages"),
    row(
        "no role",
        Conversation,
        turns({"content": "q"}, ANSWER),
        "messages[0] is {'content': 'q'}",
        "`role` and `content`",
    ),
    row("unknown role", Conversation, turns(USER, {"role": "bot", "content": "a"}), "the role 'bot'", "options.tags"),
    row("two users", Conversation, turns(USER, USER, ANSWER), "'user' follows 'user'", "merge"),
    row("two answers", Conversation, turns(USER, ANSWER, ANSWER), "'assistant' follows 'assistant'", "merge"),
    row("answer first", Conversation, turns(ANSWER, USER, ANSWER), "'assistant' follows 'system'", "take turns"),
    row(
        "late system",
        Conversation,
        turns(USER, ANSWER, USER | {"role": "system"}, ANSWER),
        "'system' follows",
        "take turns",
    ),
    row("tool unasked", Conversation, turns(USER, TOOL, ANSWER), "'tool' follows 'user'", "take turns"),
    row("unanswered", Conversation, turns(USER, ANSWER, USER), "the last one must be an assistant's", "Leave out"),
    row(
        "a picture", Conversation, turns(USER | {"content": [{"type": "image"}]}, ANSWER), "type 'image'", "text alone"
    ),
    row("pictures", Conversation, turns(USER, ANSWER) | {"images": ["a.png"]}, "it has images", "text alone"),
    row("half a weight", Conversation, turns(USER, ANSWER | {"weight": 0.5}), "has the weight 0.5", "(1) or not (0)"),
    row(
        "half a character",
        Conversation,
        turns(USER, ANSWER | {"content": "a\ud800"}),
        "half of a character",
        "whole char",
    ),
    row("no list of tools", Conversation, turns(USER, ANSWER) | {"tools": "add"}, "'tools' is 'add'", "list of desc"),
    row("no difference", Preference, {"prompt": "q", "chosen": "a", "rejected": "a"}, "equals the rejected", "Leave"),
    row("no prompt", Preference, {"chosen": "a", "rejected": "b"}, "there is no 'prompt'", "Add a column 'prompt'"),
    row(
        "two prompts",
        Preference,
        {"chosen": [USER, ANSWER], "rejected": [USER | {"content": "r"}, ANSWER]},
        "have their first 0 messages in common",
        "the same prompt",
    ),
    row(
        "no difference in whole conversations",
        Preference,
        {"chosen": [USER, ANSWER], "rejected": [USER, ANSWER]},
        "nothing to prefer",
        "Leave the record out",
    ),
    row(
        "NaN for a margin",
        Preference,
        {"prompt": "q", "chosen": "a", "rejected": "b", "margin": float("nan")},
        "'margin' has nan",
        "finite number",
    ),
    row(
        "a word for a label",
        LabelledCompletion,
        GOOD[LabelledCompletion] | {"label": "yes"},
        "'label' is 'yes'",
        "Write true",
    ),
    row(
        "a number for a label",
        LabelledCompletion,
        GOOD[LabelledCompletion] | {"label": 1},
        "'label' is 1",
        "Write true",
    ),
]


def scored(name: str, response: Any, score: Any, says: str, remedy: str) -> Broken:
    lines = [
        {"query": "q", "response": ["a", "b"], "score": [1, 2]},
        {"query": "q", "response": response, "score": score},
    ]
    return Broken(name, Preference, "".join(json.dumps(line) + "\n" for line in lines).encode(), says, remedy)


SCORED = [
    scored("one score", ["a", "b"], [1.0], "'response' has 2 items, and 'score' has 1", "one score for each"),
    scored("a score for all", ["a", "b"], 3, "'score' has 3", "one score for each"),
    scored("one response", ["a"], [1], "'response' is ['a']", "at least two"),
    scored("a response for all", "a", [1], "'response' is 'a'", "at least two"),
    scored("NaN for a score", ["a", "b"], [1, float("nan")], "'score' has nan", "finite number"),
    scored("text for a score", ["a", "b"], [1, "2"], "'score' has '2'", "finite number"),
    scored("equal scores", ["a", "b"], [1, 1], "no two responses differ", "Leave the record out"),
    scored("an empty response of two", ["a", ""], [1, 2], "'response' has the item ''", "Write a text"),
]
LINE = json.dumps(GOOD[Conversation]).encode()
LINES = [
    Broken("no JSON", Conversation, LINE + b"\n{'messages': 1}\n", "this is no JSON", "one object a line"),
    Broken("cut off", Conversation, LINE + b"\n" + LINE[:20], "this is no JSON", "one object a line"),
    Broken("a list in a line", Conversation, LINE + b"\n[1]\n", "this is a list", 'Write {"column": value, ...}'),
    Broken(
        "Latin-1", Conversation, LINE + b'\n{"text": "\xe9"}\n', "byte 11 of the line, b'\\xe9', is no UTF-8", "iconv"
    ),
    Broken("NUL bytes", Conversation, LINE + b"\n" + bytes(8) + b"\n", "byte 1 of the line is NUL", "delete the line"),
    Broken(
        "a line of 10 MB",
        Conversation,
        LINE + b'\n{"text": "' + b"x" * 10_000_000 + b'"}\n',
        "the line has 10,000,013 bytes, and the longest that is read has 8,000,000",
        "raise options.longest_row_bytes",
    ),
    Broken(
        "nested too deep", Conversation, LINE + b'\n{"a": ' + b"[" * 100_000 + b"\n", "too many brackets", "Flatten"
    ),
]
FILES = [
    Broken("empty", Conversation, b"", "is empty", "one record a line"),
    Broken("blank", Conversation, b"\n \n", "is empty", "one record a line"),
    Broken("gzip", Conversation, gzip.compress(LINE), "is packed by gzip", "gunzip"),
    Broken("UTF-16", Conversation, LINE.decode().encode("utf-16"), "is in UTF-16", "iconv -f UTF-16"),
    Broken("a web page", Conversation, b"<!DOCTYPE html>", "a page of HTML", "Download the file itself"),
    Broken(
        "a pointer",
        Conversation,
        b"version https://git-lfs.github.com/spec/v1\n",
        "a pointer of Git LFS",
        "git lfs pull",
    ),
    Broken(
        "a cut list",
        Conversation,
        b"[\n" + LINE + b",\n" + LINE[:9],
        "data.jsonl:3: the list is no JSON",
        "to the end?",
    ),
    Broken(
        "a list in Latin-1", Conversation, b'[\n{"text":\n"\xe9"}]', "data.jsonl:3: byte b'\\xe9' is no UTF-8", "iconv"
    ),
    Broken("a deep list", Conversation, b"[" * 100_000, "too many brackets", "Flatten it"),
    Broken(
        "cut Parquet",
        Preference,
        parquet_bytes()[:-200],
        "is no Parquet file, or damaged after row 0",
        "download it again",
    ),
    Broken("JSON named Parquet", Conversation, LINE, "does not begin as a parquet file does", ".jsonl", "data.parquet"),
    Broken(
        "prompts of RL",
        Conversation,
        b'{"prompt": "q", "reward_model": {}}',
        "prompts of reinforcement",
        "`prompts.path`",
    ),
    Broken(
        "of another kind", Conversation, json.dumps(GOOD[Preference]).encode(), "It looks like preferences", "columns"
    ),
    Broken("unknown columns", Preference, b'{"x": 1}', "its columns are x", "set sft.options.columns"),
    Broken("no rows in a list", Conversation, b"[]", "has no conversations", "It has no rows"),
]


@pytest.mark.parametrize("broken", ROWS + SCORED + LINES, ids=lambda broken: broken.name)
def test_a_broken_row_is_named_by_file_and_line(broken: Broken, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        open_records(broken.kind, written(broken, tmp_path), {}, "sft")
    assert str(raised.value).startswith(f"{tmp_path / broken.file}:2: ")
    assert broken.says in str(raised.value)
    assert broken.remedy in str(raised.value)


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
    assert broken.remedy in str(raised.value)


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
