"""`--dry-run` prints every command in the order of start and no password, and starts and writes nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headway.deploy.launch.base import Command

from .test_cli import headway

NOWHERE = "redis://ali:sesame@127.0.0.1:1"


def test_a_runs_commands_come_in_the_order_of_start(tmp_path: Path) -> None:
    answer = headway("run", "arithmetic.yaml", "workers.count=2", "--dry-run", "--json", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    commands = json.loads(answer.stdout)["commands"]
    assert [command["name"] for command in commands] == [
        "prepare",
        "Stage sft",
        "server",
        "learner",
        "worker-0",
        "worker-1",
    ]
    assert {command["environment"]["HEADWAY_RUN"] for command in commands[3:]} == {"arithmetic"}
    assert all(command["argv"][:3] == [sys.executable, "-m", "headway"] for command in commands)
    assert commands[3]["resources"] == {"processes": 1, "threads": 1, "gpus": 0, "devices": None}
    assert list(tmp_path.iterdir()) == []


def test_a_part_of_the_stages_is_what_is_started(tmp_path: Path) -> None:
    answer = headway("run", "arithmetic.yaml", "--until", "sft", "--dry-run", "--json", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert [command["name"] for command in json.loads(answer.stdout)["commands"]] == ["prepare", "Stage sft"]


@pytest.mark.parametrize("form", [[], ["--json"]])
@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "arithmetic.yaml", f"broker.url='{NOWHERE}'"],
        ["workers", "--count", "2", "--broker", NOWHERE, "--run", "x"],
    ],
)
def test_no_password_is_printed_and_no_server_asked(arguments: list[str], form: list[str], tmp_path: Path) -> None:
    answer = headway(*arguments, "--dry-run", *form, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert "sesame" not in answer.stdout + answer.stderr
    assert "HEADWAY_BROKER=redis://ali@127.0.0.1:1" in answer.stdout
    assert form or "# Its URL's password is not shown: set HEADWAY_BROKER_PASSWORD." in answer.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_pool_that_begins_without_workers_starts_none(tmp_path: Path) -> None:
    answer = headway("workers", "--count", "0", "--broker", NOWHERE, "--run", "x", "--dry-run", "--json", cwd=tmp_path)
    assert (answer.returncode, json.loads(answer.stdout)) == (0, {"commands": []})


def test_gpus_and_ranks_are_told(tmp_path: Path) -> None:
    answer = headway(
        "run",
        "arithmetic-vllm.yaml",
        "learner.processes=2",
        "workers.count=1",
        "workers.devices=[3]",
        "--dry-run",
        cwd=tmp_path,
    )
    assert answer.returncode == 0, answer.stderr
    assert "# worker-0: 1 GPU (3); " in answer.stdout
    assert "CUDA_VISIBLE_DEVICES=3" in answer.stdout
    assert "--nproc-per-node 2 " in answer.stdout


def test_the_workers_of_a_named_pool_have_its_name(tmp_path: Path) -> None:
    options = ("--pool", "big", "--broker", NOWHERE, "--run", "x", "--dry-run", "--json")
    answer = headway("workers", *options, cwd=tmp_path)
    assert [command["name"] for command in json.loads(answer.stdout)["commands"]] == ["big-0"]


def test_a_commands_line_runs_in_a_shell(tmp_path: Path) -> None:
    script = "import os; print(os.getcwd(), os.environ['HEADWAY_RUN'], os.environ['HEADWAY_BROKER'])"
    command = Command(
        name="w",
        argv=(sys.executable, "-c", script),
        log=None,
        cwd=tmp_path / "its own",
        environment={"HEADWAY_RUN": "it's $HOME", "HEADWAY_BROKER": "redis://ali:sesame@h?password=x&db=1"},
        exit_notice=tmp_path / "exit_notice",
    )
    answer = subprocess.run(["sh", "-c", command.line()], capture_output=True, text=True, check=True)
    assert answer.stdout == f"{tmp_path / 'its own'} it's $HOME redis://ali@h?db=1\n"
    assert "FAREWELL" not in command.line()
