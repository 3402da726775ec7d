"""`headway data` in this process tells the stages that can read a file, and marks the trained tokens of examples."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pyarrow import parquet

from headway.deploy.cli.main import answer
from headway.learner.config import PromptsConfig
from headway.learner.data.math_datasets import INSTRUCTIONS, after_hashes, last_boxed
from headway.learner.data.prompts import open_source
from tests.learner.test_record_rendering import PLAIN, tokenizer_of

USER, ANSWER = {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}
PROMPT = {"prompt": "1+1=", "ground_truth": "2"}


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Return a directory with a tokenizer of characters."""
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
    expected = f"preferences: 2 whose completions do not differ; the first: {path}:2:"
    assert expected.replace(" ", "") in "".join(shown.out.split())  # a long path wraps
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


def test_prompts_are_read_by_the_columns_that_the_recipe_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = jsonl(tmp_path / "data.jsonl", {"question": "^1+1=", "answer": "2"})
    Path("own.yaml").write_text(
        "base: arithmetic.yaml\nprompts: {kind: jsonl, path: data.jsonl,"
        " options: {prompt_field: question, ground_truth_field: answer}}\n"
    )
    report = inspected(capsys, path, "--recipe", "own.yaml")
    assert [use["use"] for use in report["uses"] if use["records"]] == ["rl"]
    assert report["examples"][0]["pieces"] == [["^1+1=", False]]


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


# --- published sets


GSM8K = [
    {"question": "How many? ", "answer": "2 * 617 = <<2*617=1234>>1234\n#### 1,234"},
    {"question": "How much?", "answer": "Less.\n#### -0.5"},
]
MATH = {"problem": "What is $x$?", "level": "Level 5", "type": "Algebra", "solution": "So $\\boxed{\\frac{1}{2}}$."}


def prepared(name: str, source: Path | str, out: Path, *options: str) -> list[dict[str, Any]]:
    assert answer(["data", name, "--from", str(source), "--out", str(out), *options]) == 0
    if out.suffix == ".parquet":
        return list(parquet.read_table(out).to_pylist())
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_gsm8k_becomes_prompts_that_reinforcement_learning_reads(
    ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw, out = jsonl(tmp_path / "raw.jsonl", *GSM8K), tmp_path / f"prompts.{ending}"
    first, second = prepared("gsm8k", raw, out)
    assert first == {
        "prompt": [
            {
                "role": "user",
                "content": "How many? Let's think step by step and output the final answer within \\boxed{}.",
            }
        ],
        "ground_truth": "1234",
        "data_source": "openai/gsm8k",
        "extra_info": {"index": 0, **GSM8K[0]},
    }
    assert second["ground_truth"] == "-0.5"
    assert "2 prompts" in capsys.readouterr().out
    source = open_source(PromptsConfig(kind=ending, path=str(out)), seed=0)
    assert (source.size, source.train(0, 1).ground_truth) == (2, "-0.5")


def test_gsm8k_asks_for_hashes_as_text_where_it_is_told_to(tmp_path: Path) -> None:
    raw = jsonl(tmp_path / "raw.jsonl", *GSM8K)
    rows = prepared("gsm8k", raw, tmp_path / "prompts.jsonl", "--answer", "hashes", "--as-text")
    assert rows[1]["prompt"] == 'How much? Let\'s think step by step and output the final answer after "####".'


def test_gsm8k_is_read_from_the_hugging_face_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None, str]] = []

    class Package(ModuleType):
        @staticmethod
        def load_dataset(name: str, subset: str | None, split: str) -> list[dict[str, Any]]:
            asked.append((name, subset, split))
            return GSM8K

    monkeypatch.setitem(sys.modules, "datasets", Package("datasets"))
    rows = prepared("gsm8k", "hf:openai/gsm8k", tmp_path / "prompts.jsonl", "--split", "test")
    assert asked == [("openai/gsm8k", "main", "test")]
    assert [row["ground_truth"] for row in rows] == ["1234", "-0.5"]
    prepared("gsm8k", "hf:mine/gsm8k", tmp_path / "prompts.jsonl", "--subset", "socratic")
    assert asked[1:] == [("mine/gsm8k", "socratic", "train")]


def test_a_hub_without_its_package_or_a_wrong_row_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["data", "gsm8k", "--from", "hf:some/thing", "--out", str(tmp_path / "prompts.jsonl")]
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert answer(asked) == 1
    assert "--from: hf:some/thing needs the `datasets` package" in capsys.readouterr().err
    package = ModuleType("datasets")
    monkeypatch.setattr(package, "load_dataset", lambda name, subset, split: [{"x": 1}], raising=False)
    monkeypatch.setitem(sys.modules, "datasets", package)
    assert answer(asked) == 1
    assert "hf:some/thing[train]: row 1" in capsys.readouterr().err


def test_math_is_read_from_a_directory_with_a_file_for_each_problem(tmp_path: Path) -> None:
    for number, kind in enumerate(("algebra", "geometry")):
        (tmp_path / "raw" / kind).mkdir(parents=True)
        (tmp_path / "raw" / kind / "1.json").write_text(json.dumps(MATH | {"level": f"Level {number}"}, indent=4))
    rows = prepared("math", tmp_path / "raw", tmp_path / "prompts.jsonl")
    assert [row["ground_truth"] for row in rows] == ["\\frac{1}{2}"] * 2
    assert [row["extra_info"]["level"] for row in rows] == ["Level 0", "Level 1"]
    assert rows[0]["prompt"][0]["content"].endswith("What is $x$? " + INSTRUCTIONS["boxed"])


@pytest.mark.parametrize(
    ("solution", "expected"),
    [
        (r"$\boxed{5}$", "5"),
        (r"first $\boxed{1}$, then $\boxed{\frac{a}{b}}$.", r"\frac{a}{b}"),
        (r"$\boxed{\{1, 2\}}$", r"\{1, 2\}"),
        (r"$\boxed{\left\{x \mid x^{2} > 0\right\}}$", r"\left\{x \mid x^{2} > 0\right\}"),
        (r"$\fbox{7}$", "7"),
        (r"$\boxed 9$", "9"),
        (r"$\boxed{\text{(A)}}$ and more {braces}", r"\text{(A)}"),
        (r"$\boxed{5$", None),
        (r"$\boxed{}$", None),
        ("5", None),
    ],
)
def test_the_last_box_ends_at_the_brace_that_closes_it(solution: str, expected: str | None) -> None:
    assert last_boxed(solution) == expected


@pytest.mark.parametrize(
    ("solution", "expected"),
    [
        ("#### 72", "72"),
        ("#### 1,234,567", "1234567"),
        ("a\n####-3", "-3"),
        ("#### 2.50", "2.50"),
        ("#### 1 #### 2.", "2"),
        ("#### many", None),
        ("72", None),
    ],
)
def test_the_number_behind_hashes_has_no_commas(solution: str, expected: str | None) -> None:
    assert after_hashes(solution) == expected


def test_a_row_without_an_answer_is_refused_or_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = jsonl(tmp_path / "raw.jsonl", *GSM8K, {"question": "Why?", "answer": "Because."}, {"question": "Who?"})
    out = tmp_path / "prompts.jsonl"
    assert answer(["data", "gsm8k", "--from", raw, "--out", str(out)]) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert f"{raw}:3: 'answer' has no `#### 42` at its end, but ends with 'Because.'" in error
    assert not out.exists()
    assert answer(["data", "gsm8k", "--from", raw, "--out", str(out), "--skip-broken", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["rows"], report["skipped"]) == (2, {"without an answer": 1, "without 'answer'": 1})


@pytest.mark.parametrize(
    ("source", "out", "message"),
    [
        ("nowhere", "a.jsonl", "there is no nowhere"),
        ("empty", "a.jsonl", "empty has no JSON, Parquet or Arrow files below it"),
        ("raw.jsonl", "a.csv", "a.csv must end with .jsonl or .parquet"),
        ("raw.jsonl", "nowhere/a.jsonl", "cannot be written: No such file or directory"),
    ],
)
def test_a_set_that_cannot_be_read_or_written(
    source: str,
    out: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    jsonl(tmp_path / "raw.jsonl", *GSM8K)
    assert answer(["data", "gsm8k", "--from", source, "--out", out]) == 1
    assert message in " ".join(capsys.readouterr().err.split())
