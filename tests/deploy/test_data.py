"""`headway data` in this process: what a file is to each stage, and examples with the trained tokens marked."""

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.cli.main import answer
from tests.learner.test_record_rendering import PLAIN, tokenizer_of

USER, ANSWER = {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}
PROMPT = {"prompt": "1+1=", "ground_truth": "2"}


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A directory with a tokenizer of characters."""
    directory = tmp_path / "model"
    tokenizer_of(PLAIN).save_pretrained(directory)
    return str(directory)


def jsonl(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def inspected(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert answer(["data", "inspect", *arguments, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize(
    ("row", "layouts"),
    [
        (PROMPT, {"rl": "jsonl"}),
        (PROMPT | {"prompt": [USER], "reward_model": {"ground_truth": "2"}, "data_source": "sums"}, {"rl": "jsonl"}),
        ({"messages": [USER, ANSWER]}, {"sft": "messages"}),
        ({"query": "1", "response": "2"}, {"sft": "query_response"}),
        ({"prompt": "1", "chosen": "2", "rejected": "3"}, {"preferences": "preference"}),
        ({"prompt": "1", "completion": "2", "label": True}, {"kto": "unpaired"}),
        (PROMPT | {"completion": "2"}, {"rl": "jsonl", "sft": "prompt_completion"}),
    ],
)
def test_it_says_which_stages_can_train_on_a_file(
    row: dict[str, Any], layouts: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = inspected(capsys, jsonl(tmp_path / "data.jsonl", row))
    assert {use["use"]: use["layout"] for use in report["uses"] if use["records"]} == layouts
    assert [use["use"] for use in report["uses"]] == ["rl", "sft", "preferences", "kto"]
    assert all(bool(use["error"]) == (use["use"] not in layouts) for use in report["uses"])


def test_it_counts_broken_rows_by_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, same = {"prompt": "1", "chosen": "2", "rejected": "3"}, {"prompt": "1", "chosen": "2", "rejected": "2"}
    path = jsonl(tmp_path / "data.jsonl", good, same, same, {"prompt": "1", "chosen": "2"})
    (use,) = [use for use in inspected(capsys, path)["uses"] if use["records"]]
    assert (use["rows"], use["records"]) == (4, 1)
    assert {each["reason"]: each["rows"] for each in use["broken"]} == {
        "whose completions do not differ": 2,
        "without 'rejected'": 1,
    }
    assert answer(["data", "inspect", path]) == 0
    shown = capsys.readouterr()
    assert f"preferences: 2 whose completions do not differ; the first: {path}:2:" in " ".join(shown.out.split())
    assert not shown.err


def test_examples_show_which_tokens_are_trained(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = jsonl(tmp_path / "data.jsonl", *[{"messages": [USER, ANSWER]}] * 5)
    examples = inspected(capsys, path, "--model", model)["examples"]
    assert [example["place"] for example in examples] == [f"{path}:1", f"{path}:2", f"{path}:3"]
    assert examples[0]["pieces"] == [["<u>1+1=\n<a>", False], ["2~", True], ["\n", False]]
    assert (examples[0]["tokens"], examples[0]["trained_tokens"]) == (14, 2)
    assert answer(["data", "inspect", path, "--model", model]) == 0
    assert "<u>1+1=\n<a>⟦2~⟧\n" in capsys.readouterr().out


def test_both_sides_of_a_preference_and_labels_are_examples(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = jsonl(tmp_path / "pairs.jsonl", {"prompt": "1", "chosen": "2", "rejected": "3"})
    examples = inspected(capsys, pair, "--model", model)["examples"]
    assert [(each["what"], each["pieces"]) for each in examples] == [
        ("chosen", [["1", False], ["2~", True]]),
        ("rejected", [["1", False], ["3~", True]]),
    ]
    labelled = jsonl(tmp_path / "kto.jsonl", {"prompt": "1", "completion": "2", "label": False})
    assert [each["what"] for each in inspected(capsys, labelled, "--model", model)["examples"]] == ["undesirable"]


def test_prompts_are_shown_as_the_recipes_model_gets_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = jsonl(tmp_path / "data.jsonl", {"prompt": "^1+1=", "ground_truth": "2"})
    (example,) = inspected(capsys, path, "--recipe", "arithmetic.yaml")["examples"]
    assert (example["what"], example["pieces"], example["trained_tokens"]) == ("prompt", [["^1+1=", False]], 0)


def test_a_file_without_a_use_says_why_for_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["data", "inspect", jsonl(tmp_path / "data.jsonl", {"x": 1})]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "rl: no row is a prompt with a ground truth" in shown
    assert "its columns are x" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.jsonl"], "'nowhere.jsonl' is no file or directory"),
        (["data.jsonl", "--recipe", "arithmetic.yaml", "--model", "."], "--recipe and --model exclude each other"),
    ],
)
def test_wrong_arguments(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "data.jsonl", PROMPT)
    assert answer(["data", "inspect", *arguments]) == 1
    assert message in capsys.readouterr().err
