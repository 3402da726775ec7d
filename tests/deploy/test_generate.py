"""`headway generate` answers every prompt once, however often the process is killed."""

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from headway.deploy.cli.main import answer
from headway.deploy.recipe.resolve import dump_recipe, load_recipe
from tests.full_disk import no_files_over
from tests.rollout_workers.reward_models import save_model

from .tiny_model import SMALL, greedy, make_model

PROMPTS = ["1+2=", "^7*8-9=", "3", "#44", "5,6,7="]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write(tmp_path / "prompts.jsonl", PROMPTS)


def write(path: Path, prompts: list[Any]) -> Path:
    path.write_text("".join(json.dumps({"prompt": prompt, "id": 7}) + "\n" for prompt in prompts))
    return path


def generate(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """Return the command's --json output, or its error where it fails."""
    code = answer(["generate", *map(str, arguments), "--json"])
    said = capsys.readouterr()
    return {"error": said.err} if code else {"code": code, **json.loads(said.out)}


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_greedy_answers_are_those_of_transformers_in_the_order_of_the_prompts(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = generate(capsys, model, prompts, "--out", tmp_path / "a.jsonl", "--temperature", 0, "--samples", 2, *SMALL)
    assert (said["prompts"], said["found"], said["responses"]) == (5, 0, 10)
    tokenizer = AutoTokenizer.from_pretrained(model)
    for index, (prompt, line) in enumerate(zip(PROMPTS, answers(tmp_path / "a.jsonl"), strict=True)):
        response = greedy(model, prompt)
        is_ended = response[-1].item() == tokenizer.eos_token_id
        expected = {
            "text": tokenizer.decode(response, skip_special_tokens=True),
            "tokens": len(response),
            "finish_reason": "stop" if is_ended else "length",
        }
        assert line == {
            "index": index,
            "prompt": prompt,
            "prompt_tokens": len(tokenizer(prompt).input_ids),
            "responses": [expected, expected],
            "model": str(model),
            "made_from": line["made_from"],
        }


def test_a_conversation_is_rendered_by_the_chat_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model(tmp_path / "chat", "{% for message in messages %}^{{ message.content }}={% endfor %}")
    prompts = write(tmp_path / "p.jsonl", [[{"role": "user", "content": "1+1"}]])
    assert "code" in generate(capsys, model, prompts, "--out", tmp_path / "a.jsonl", *SMALL)
    assert answers(tmp_path / "a.jsonl")[0]["prompt"] == "^1+1="


def test_what_is_missing_is_generated_and_what_is_there_stays(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    assert generate(capsys, model, prompts, "--out", whole, "--samples", 2, *SMALL)["responses"] == 10
    lines = whole.read_bytes().splitlines(keepends=True)
    assert len({line for answer in answers(whole) for line in [answer["responses"][0]["text"]]}) > 1
    broken.write_bytes(lines[3] + lines[1] + lines[0][:40])
    said = generate(capsys, model, prompts, "--out", broken, "--samples", 2, *SMALL)
    assert (said["prompts"], said["found"], said["responses"]) == (5, 2, 6)
    assert broken.read_bytes() == whole.read_bytes()
    assert generate(capsys, model, prompts, "--out", broken, "--samples", 2, *SMALL)["responses"] == 0


def test_shards_together_make_the_whole(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def texts(*options: str) -> dict[int, Any]:
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        assert "code" in generate(capsys, model, prompts, "--out", out, *options, *SMALL)
        return {line["index"]: line["responses"] for line in answers(out)}

    first, second = texts("--shard", "1/2"), texts("--shard", "2/2")
    assert (list(first), list(second)) == ([0, 2, 4], [1, 3])
    assert first | second == texts()
    assert texts("--seed", "1") != texts()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--samples", "3"], "made from other weights, prompts or settings. Choose another --out, or remove the file."),
        (["--seed", "1"], "made from other weights, prompts or settings."),
        (["sampling.top_k=3"], "made from other weights, prompts or settings."),
        (["--shard", "3/2"], "'3/2' is given; expected I/N such as 2/4."),
        (["engine.max_model_len=6"], "prompts.jsonl:2: the prompt has 7 tokens, and engine.max_model_len=6 is for"),
        (["sampling.temprature=1"], "override: unknown key sampling.temprature; did you mean sampling.temperature?"),
        (["learner.steps=1"], "override: unknown key learner"),
        (["engine.kind=vlm"], "engine.kind"),
    ],
)
def test_what_cannot_go_on_is_refused_before_anything_is_generated(
    arguments: list[str],
    message: str,
    model: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "a.jsonl"
    line = {"index": 0, "prompt": "1", "prompt_tokens": 1, "responses": [], "model": "another", "made_from": "0"}
    out.write_text(json.dumps(line) + "\n")
    assert message in generate(capsys, model, prompts, "--out", out, *SMALL, *arguments)["error"]
    assert answers(out) == [line]


def test_a_file_of_something_else_is_left_alone(model: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "prompts.jsonl:1 is no answer of" in generate(capsys, model, prompts, "--out", prompts, *SMALL)["error"]
    assert len(answers(prompts)) == len(PROMPTS)


def test_a_full_disk_keeps_whole_lines_and_the_next_call_goes_on(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.jsonl"
    with no_files_over(500):
        said = generate(capsys, model, prompts, "--out", out, *SMALL)
    assert "run the same command again: it goes on" in said["error"]
    kept = len(answers(out))
    assert 0 < kept < 5
    assert generate(capsys, model, prompts, "--out", out, *SMALL)["found"] == kept
    assert [line["index"] for line in answers(out)] == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_a_killed_process_is_continued_and_no_prompt_is_lost_or_answered_twice(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    count, out = 400, tmp_path / "a.jsonl"
    prompts = write(tmp_path / "many.jsonl", [f"{number}+1=" for number in range(count)])
    arguments = [str(model), str(prompts), "--out", str(out), "engine.max_model_len=64", "sampling.max_new_tokens=48"]
    slow = subprocess.Popen([sys.executable, "-m", "headway", "generate", *arguments, "engine.max_concurrent=2"])
    while not out.exists() or out.read_bytes().count(b"\n") < 5:
        assert slow.poll() is None, "the process has ended before it was killed"
        time.sleep(0.01)
    slow.kill()
    slow.wait()
    before = out.read_bytes().splitlines()[:5]
    said = generate(capsys, *arguments)
    assert 5 <= said["found"] < count
    assert said["responses"] == count - said["found"]
    assert Counter(line["index"] for line in answers(out)) == Counter(range(count))
    assert set(before) <= set(out.read_bytes().splitlines())


@pytest.mark.parametrize("command", [["generate", "rm", "prompts.jsonl", "--out", "a.jsonl"], ["chat", "rm"]])
def test_a_reward_model_is_told_to_write_nothing(
    command: list[str], prompts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(prompts.parent)
    save_model(Path("rm"), scores=True)
    assert answer(command) == 1
    assert "rm is a reward model, which scores text and writes none. Give a policy" in capsys.readouterr().err


def test_prompts_are_in_the_runs_own_column_where_a_row_has_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    model = make_model(run / "sft")
    own = load_recipe("arithmetic.yaml", ["prompts={kind: jsonl, path: t.jsonl, options: {prompt_field: question}}"])
    (run / "config.yaml").write_text(dump_recipe(own))
    asked = tmp_path / "asked.jsonl"
    asked.write_text('{"question": "1+2=", "prompt": "3"}\n{"prompt": "4", "answer": "5"}\n')
    generate(capsys, model, asked, "--out", tmp_path / "a.jsonl", *SMALL)
    assert [line["prompt"] for line in answers(tmp_path / "a.jsonl")] == ["1+2=", "4"]
    asked.write_text('{"prompt": null, "question": null}\n')
    said = generate(capsys, model, asked, "--out", tmp_path / "b.jsonl", *SMALL)["error"]
    assert "asked.jsonl:1: 'question' is null" in said
    asked.write_text('{"text": "1+2="}\n')
    said = generate(capsys, model, asked, "--out", tmp_path / "b.jsonl", *SMALL)["error"]
    assert "asked.jsonl:1: no 'prompt' and no 'question', the run's prompts.options.prompt_field" in said
