"""A test types the commands of docs/guides/first-model.md in the page's order, and finds the output that it shows.

`headway` runs in this process, since each command would import torch anew; the shell runs all other lines.
"""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from headway.deploy.cli.main import answer

from .pages import ROOT
from .test_walk import Shape

PAGE = ROOT / "docs" / "guides" / "first-model.md"
COMMANDS = ["data", "data", "train", "chat", "generate", "export"]
"""The commands that the page has its reader type, in this order."""
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]*)")?\n(.*?)^```', re.M | re.S)


def test_a_reader_trains_asks_and_exports_by_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    page, said = PAGE.read_text(), ""
    assert re.findall(r"^headway (\w+)", page, re.M) == COMMANDS
    for language, title, text in BLOCK.findall(page):
        match language:
            case "yaml":
                Path(title).write_text(text)
            case "sh":
                said = type_in(text, monkeypatch, capsys)
            case "text":
                assert Shape(text, exactly=True).is_in(said), said
    answers = [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()]
    right = [json.loads(line)["completion"] for line in Path("sums.jsonl").read_text().splitlines()]
    assert [one["responses"][0]["text"] for one in answers] == right
    assert AutoModelForCausalLM.from_pretrained("sums-model").config.hidden_size == 64


def type_in(block: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Run the block's lines, and return the output of its `headway` commands."""
    shell, *commands = re.split(r"^headway ", block, flags=re.M)
    subprocess.run(["bash", "-ec", shell], check=True)
    said = ""
    for command in commands:
        arguments, _, given = command.partition(" < ")
        with Path(given.strip() or "/dev/null").open() as file:
            monkeypatch.setattr("sys.stdin", file)
            code = answer(shlex.split(arguments))
        printed = capsys.readouterr()
        assert not code, printed.err
        said += printed.out
    return said
