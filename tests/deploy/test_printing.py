"""A terminal shows text of others and never obeys it."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Group, RenderableType
from rich.table import Table

from headway.broker import Broker
from headway.broker.schema.status import RunStatus
from headway.broker.wire.codec import encode
from headway.deploy.observe.bottleneck import Bottleneck
from headway.deploy.observe.live import Monitor, panel
from headway.deploy.observe.status_tables import status_tables
from headway.deploy.printing import paragraph, say, say_json, visible
from headway.deploy.terminal import Terminal, styled

from .runs import run_status, worker
from .test_cli import clean_environment, headway

HOSTILE = "\x1b[2J\x1b]0;owned\x07\x9b31m\x7f\r\u202e\u2028[/][bold red]:skull:\udcff"
"""Text that clears the screen, names the window, colours, deletes, goes back, turns round, and has half a character."""


def is_harmless(printed: str) -> bool:
    return not any(visible(character) != character for character in printed)


def test_what_a_terminal_would_obey_is_shown() -> None:
    assert visible("a\tb\nc é 中 🙂") == "a\tb\nc é 中 🙂"
    assert visible("\x1b[31m\x9b\r\u202e\udcff") == "\\x1b[31m\\x9b\\r\\u202e\\udcff"
    assert visible(visible(HOSTILE)) == visible(HOSTILE)
    visible(HOSTILE).encode()
    assert paragraph(" one\n  two\r\nthree\n") == "one two three"


def test_a_line_and_json_are_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    say(HOSTILE)
    assert is_harmless(printed := capsys.readouterr().out)
    assert "[/][bold red]:skull:" in printed
    content = {"name": HOSTILE[:-1], "loss": float("nan")}
    say_json(content)
    assert is_harmless(printed := capsys.readouterr().out)
    assert json.loads(printed) == {"name": HOSTILE[:-1], "loss": None}


def hostile_status() -> RunStatus:
    status = run_status()
    workers = tuple(msgspec.structs.replace(info, worker=HOSTILE, engine=HOSTILE) for info in status.workers)
    workers += (worker("w", None, last_error=HOSTILE),)
    return msgspec.structs.replace(status, run=HOSTILE, state=HOSTILE, workers=workers)


def hostile_waiting() -> Bottleneck:
    return Bottleneck(who="learner", why="groups", text=HOSTILE, is_quiet=True, quiet_s=40.0)


def table() -> Table:
    found = Table(HOSTILE, title=HOSTILE, caption=HOSTILE)
    found.add_row(HOSTILE)
    return found


@pytest.mark.parametrize(
    "shown",
    [
        HOSTILE,
        styled(HOSTILE, (HOSTILE, "red")),
        Group(HOSTILE, styled(HOSTILE)),
        table(),
        status_tables(hostile_status()),
        status_tables(hostile_status(), hostile_waiting()),
        panel(hostile_status(), None, 1.0),
        panel(hostile_status(), None, 1.0, hostile_waiting()),
    ],
)
@pytest.mark.parametrize("is_terminal", [True, False])
def test_nothing_that_is_shown_is_obeyed(shown: RenderableType, is_terminal: bool) -> None:
    output = io.StringIO()
    Terminal(file=output, width=300, force_terminal=is_terminal, color_system=None).print(shown)
    assert is_harmless(output.getvalue())
    assert "\\x1b[2J\\x1b]0;owned\\x07" in output.getvalue()
    assert "[/][bold red]:skull:" in output.getvalue()


def test_a_line_above_the_panel_and_the_panel_are_harmless() -> None:
    output = io.StringIO()
    monitor = Monitor(lambda: (hostile_status(), hostile_waiting()), Terminal(file=output, width=300))
    monitor._refresh()
    monitor.say(HOSTILE)
    assert is_harmless(output.getvalue())


def test_own_styles_do_colour() -> None:
    output = io.StringIO()
    Terminal(file=output, force_terminal=True, color_system="standard").print(styled("a ", ("b", "red"), "[c]"))
    assert output.getvalue() == "a \x1b[31mb\x1b[0m[c]\n"


async def test_status_survives_whatever_a_worker_wrote(broker: Broker, url: str, run_name: str, tmp_path: Path) -> None:
    await begin_with_hostile_workers(broker)
    for arguments in (["status", "--run", run_name], ["status", "--run", run_name, "--json"], ["runs", "list"]):
        answer = headway(*arguments, "--broker", url, cwd=tmp_path)
        assert answer.returncode == 0, answer.stderr
        assert is_harmless(answer.stdout + answer.stderr)
    assert "good" in headway("status", "--run", run_name, "--broker", url, cwd=tmp_path).stdout


async def begin_with_hostile_workers(broker: Broker) -> None:
    from tests.broker.scenario import begin, rules

    await begin(broker, rules(0))
    await broker.status.heartbeat(worker("good", None, last_error=HOSTILE), 60.0)
    send, keys = broker._connection.execute, broker._connection.keys.hidden
    for name in (b"\xff", b"[/]", HOSTILE[:-1].encode()):
        await send("SADD", keys("workers"), name)
        info = msgspec.structs.replace(worker("x", None), worker=name.decode(errors="replace"))
        await send("SET", keys("worker:").encode() + name, encode(info))


def test_a_log_line_is_harmless(tmp_path: Path) -> None:
    script = (
        "from headway.deploy.printing import log_to_stderr, OF_ROLES; import logging\n"
        "log_to_stderr(logging.INFO, OF_ROLES)\n"
        "logging.getLogger('x').info('worker %s', '\\x1b[2J')"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert answer.stderr.endswith("worker \\x1b[2J\n")


def test_an_argument_that_is_no_text_is_shown(tmp_path: Path) -> None:
    for arguments in (["run", "\udcff\x1b[2J"], ["status", "--\udcff\x1b[2J"], ["broker", "--port", "\x1b[2J\udcff"]):
        answer = headway(*arguments, cwd=tmp_path)
        assert answer.returncode in (1, 2), answer.stderr
        assert is_harmless(answer.stderr)
        assert "\\x1b[2J" in answer.stderr


@pytest.mark.parametrize("command", ["algorithms", "algorithms --json", "--help"])
def test_an_output_that_takes_no_more_is_said(command: str, tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "headway", *command.split()]
    with open("/dev/full", "w") as full:
        answer = subprocess.run(
            arguments,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=clean_environment(),
            check=False,
        )
    assert answer.returncode == 1
    assert answer.stderr.startswith("Error: ")
    assert "No space left on device" in answer.stderr
    assert len(answer.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", ["algorithms", "algorithms --json", "--help"])
def test_a_reader_that_left_is_no_error(command: str, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    arguments = [sys.executable, "-m", "headway", *command.split()]
    answer = subprocess.run(
        arguments, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=clean_environment(), check=False
    )
    os.close(writer)
    assert (answer.returncode, answer.stderr) == (1, "")
