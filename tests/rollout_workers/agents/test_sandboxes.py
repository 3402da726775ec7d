"""One contract for all kinds of sandboxes: what a run gets and gives, its limits, and its end."""

import asyncio
import json
import os
import signal
import sys
import textwrap
import threading
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from headway.broker.errors import ConfigError
from headway.rollout_workers.agents import sandbox as sandbox_module
from headway.rollout_workers.agents.conversation import ToolCall
from headway.rollout_workers.agents.sandbox import Sandbox, SandboxOptions, open_sandboxes
from headway.rollout_workers.agents.sandbox.canary import check
from headway.rollout_workers.agents.tasks.python_math import PythonMathOptions, python_tool
from headway.rollout_workers.agents.tools.toolbox import Toolbox
from tests.rollout_workers.agents.sandbox_kinds import HERE, UnconfinedSandbox, children, named, open_one, until

CPYTHON = [kind for kind in HERE if kind != "monty"]
NAMES_ITSELF = "import ctypes; ctypes.CDLL(None).prctl(15, {name!r}.encode())\n"


@pytest.fixture(params=HERE)
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    async with await open_one(request.param) as opened:
        yield opened


@pytest.fixture(params=CPYTHON)
async def cpython(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    async with await open_one(request.param) as opened:
        yield opened


async def test_code_prints(sandbox: Sandbox) -> None:
    ran = await sandbox.run("import math\nprint(math.factorial(20))\nprint('ä\U0001f600')")
    assert (ran.outcome, ran.output, ran.error) == ("ok", "2432902008176640000\nä\U0001f600\n", "")


async def test_code_raises(sandbox: Sandbox) -> None:
    ran = await sandbox.run("print(1)\ndef f():\n    return 1 / 0\nf()")
    assert (ran.outcome, ran.output) == ("raised", "1\n")
    assert "line 3, in f" in ran.error
    assert ran.error.rstrip().endswith("ZeroDivisionError: division by zero")


async def test_code_that_is_no_python(sandbox: Sandbox) -> None:
    ran = await sandbox.run("print(1)\nif:")
    assert ran.outcome == "raised"
    assert "SyntaxError" in ran.error


async def test_the_value_of_the_last_line_stays_inside(sandbox: Sandbox) -> None:
    assert (await sandbox.run("x = 5\nx")).output == ""


async def test_files_are_given(sandbox: Sandbox) -> None:
    code = "print(open('a.txt').read(), open('b/c.txt').read())"
    assert (await sandbox.run(code, {"a.txt": b"one", "b/c.txt": b"two"})).output == "one two\n"
    assert (await sandbox.run(code)).outcome == "raised"


async def test_files_may_be_written_and_are_gone(sandbox: Sandbox) -> None:
    writes = "with open('x.txt', 'w') as file:\n    file.write('text')\nprint(open('x.txt').read())"
    assert (await sandbox.run(writes)).output == "text\n"
    assert (await sandbox.run("print(open('x.txt').read())")).outcome == "raised"


async def test_input_is_read(sandbox: Sandbox) -> None:
    ran = await sandbox.run("print(input(), input('> ').upper())", stdin="first\nsecond\n")
    assert ran.output.replace("> ", "") == "first SECOND\n"
    ran = await sandbox.run("print(input())")
    assert ran.outcome == "raised"
    assert "EOF" in ran.error


@pytest.mark.parametrize("name", ["/tmp/x", "../x", "a/../../x", "", "a\0b", "."])
async def test_files_elsewhere_are_refused(sandbox: Sandbox, name: str) -> None:
    assert (await sandbox.run("print(1)", {name: b"x"})).outcome == "refused"
    assert (await sandbox.run("print(1)", {"a": b"x", "a/b": b"x"})).outcome == "refused"


@pytest.mark.parametrize("code", ["print('\ud800')", "print(1)\0", "#" * 5_000_000])
async def test_what_is_no_text_is_refused(sandbox: Sandbox, code: str) -> None:
    ran = await sandbox.run(code)
    assert (ran.outcome, ran.output) == ("refused", "")
    assert ran.error
    assert (await sandbox.run("print(1)")).output == "1\n"


async def test_state_is_kept_where_it_is_said(sandbox: Sandbox) -> None:
    await sandbox.run("x = 41")
    ran = await sandbox.run("print(x + 1)")
    assert (ran.outcome, ran.output) == (("ok", "42\n") if sandbox.keeps_state else ("raised", ""))


async def test_runs_of_two_sandboxes_share_nothing(sandbox: Sandbox) -> None:
    async with await open_one(sandbox.kind) as other:
        await sandbox.run("x = 1")
        assert "NameError" in (await other.run("print(x)")).error


async def test_runs_wait_for_each_other(sandbox: Sandbox) -> None:
    rans = await asyncio.gather(*(sandbox.run(f"print({number})") for number in range(3)))
    assert [ran.output for ran in rans] == ["0\n", "1\n", "2\n"]


async def test_a_run_is_ended_at_its_time(sandbox: Sandbox) -> None:
    async with await open_one(sandbox.kind, seconds=1) as short:
        ran = await short.run("print('begun')\ntry:\n    while True: pass\nexcept BaseException: print('caught')")
        assert ran.outcome == "timeout"
        assert "caught" not in ran.output
        assert (await short.run("pass")).outcome in ("ok", "timeout")  # a start may take a second here


async def test_output_is_bounded(sandbox: Sandbox) -> None:
    async with await open_one(sandbox.kind, output_bytes=1000) as short:
        ran = await short.run("for number in range(10**9): print('x' * 1000)")
        assert ran.outcome == "output"
        assert len(ran.output.encode()) == 1000
        ran = await short.run("import sys\nfor number in range(10**9): print('x' * 1000, file=sys.stderr)")
        assert ran.outcome == "output"
        assert (await short.run("print('x' * 999)")).outcome == "ok"


async def test_memory_is_bounded(sandbox: Sandbox) -> None:
    for code in ("x = 'a' * 10**10", "x = []\nwhile True: x.append('a' * 10**6 + str(len(x)))"):
        assert (await sandbox.run(code)).outcome == "memory"
        assert (await sandbox.run("print(1)")).output == "1\n"


async def test_scratch_is_bounded(sandbox: Sandbox) -> None:
    async with await open_one(sandbox.kind, scratch_bytes=1 << 20) as small:
        ran = await small.run("with open('a', 'w') as file:\n    for number in range(10**6): file.write('x' * 10**5)")
        assert ran.outcome == "disk"
        many = "for number in range(10**6):\n    with open(f'a{number}', 'w') as file: file.write('x' * 1000)"
        assert (await small.run(many)).outcome in ("disk", "memory")


async def test_a_closed_sandbox_refuses(sandbox: Sandbox) -> None:
    await sandbox.run("x = 1")
    await sandbox.close()
    await sandbox.close()
    assert (await sandbox.run("print(1)")).outcome == "refused"


async def test_closing_ends_a_run(sandbox: Sandbox) -> None:
    running = asyncio.ensure_future(sandbox.run("while True: pass"))
    await until(children)
    await sandbox.close()
    assert (await running).outcome == "killed"
    assert children() == []


async def test_cancelling_ends_a_run(sandbox: Sandbox) -> None:
    running = asyncio.ensure_future(sandbox.run("while True: pass"))
    await until(children)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (await sandbox.run("print(1)")).output == "1\n"
    await sandbox.close()
    assert children() == []


async def test_a_process_of_the_sandbox_dies(sandbox: Sandbox) -> None:
    running = asyncio.ensure_future(sandbox.run("while True: pass"))
    await until(children)
    os.kill(children()[0], signal.SIGKILL)
    assert (await running).outcome == "killed"
    assert (await sandbox.run("print(1)")).output == "1\n"


async def test_no_process_is_left_behind(cpython: Sandbox) -> None:
    name = f"hw{uuid.uuid4().hex[:10]}"
    forks = NAMES_ITSELF.format(name=name) + textwrap.dedent("""
        import os, time
        for number in range(3):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    os.close(1)
                    os.close(2)
                    time.sleep(1000)
                os._exit(0)
        print("left")
    """)
    ran = await cpython.run(forks)
    assert (ran.outcome, ran.output) == ("ok", "left\n")
    assert named(name) == []
    running = asyncio.ensure_future(cpython.run(forks + "\ntime.sleep(1000)"))
    await until(lambda: len(named(name)) >= 4)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert named(name) == []


async def test_a_run_ends_with_its_worker(cpython: Sandbox) -> None:
    name = f"hw{uuid.uuid4().hex[:10]}"
    program = f"""
import asyncio
from tests.rollout_workers.agents.sandbox_kinds import PATIENT
from {type(cpython).__module__} import {type(cpython).__name__}
asyncio.run({type(cpython).__name__}(PATIENT).run({NAMES_ITSELF.format(name=name) + "while True: pass"!r}))
"""
    worker = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    await until(lambda: named(name))
    worker.kill()
    await worker.wait()
    await until(lambda: not named(name))


@pytest.mark.parametrize(("kind", "runs"), [("monty", 300), *((kind, 3) for kind in CPYTHON)])
async def test_runs_leave_nothing(kind: str, runs: int) -> None:
    await leaves_nothing(kind, runs)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CPYTHON)
async def test_hundreds_of_runs_leave_nothing(kind: str) -> None:
    await leaves_nothing(kind, 300)


async def leaves_nothing(kind: str, runs: int) -> None:
    process = psutil.Process()
    codes = ("print(1)", "1 / 0", "x = 'a' * 10**10", "for i in range(10**9): print('x' * 10**4)", "if:", "y = 1")

    async def episode(number: int) -> None:
        async with await open_one(kind) as opened:
            await opened.run(codes[number % len(codes)])
            await opened.run("print(2)", {"a": b"b"})

    for number in range(2):
        await episode(number)
    before = process.num_fds(), process.memory_info().rss
    for number in range(runs):
        await episode(number)
    assert process.num_fds() <= before[0] + 2
    assert process.memory_info().rss <= before[1] + (64 << 20)
    assert children() == []
    await until(lambda: not [one for one in threading.enumerate() if one.name.startswith("waitpid")])


async def test_the_canary_finds_what_is_not_confined(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not confine code here: it could read a file outside"):
        await check(UnconfinedSandbox, SandboxOptions(seconds=600, readable=(str(tmp_path),)))


@pytest.mark.parametrize("broken", ["files", "network", "time", "start"])
async def test_the_canary_finds_each_hole(broken: str, tmp_path: Path) -> None:
    class Holed(UnconfinedSandbox):
        """Answers as a good sandbox would, but for one hole."""

        async def run(self, code: str, *_: object, **__: object) -> sandbox_module.Ran:
            is_hole = {"files": '"w"', "network": "socket", "time": "while", "start": "6 * 7"}[broken] in code
            if is_hole and broken == "time":
                return sandbox_module.Ran(outcome="ok")
            if is_hole and broken == "start":
                return sandbox_module.Ran(outcome="raised", error="no Python")
            if is_hole:
                return await super().run(code)
            output = "42\n" if "6 * 7" in code else "denied"
            return sandbox_module.Ran(outcome="timeout" if "while" in code else "ok", output=output)

    said = {"files": "write a file", "network": "connect to a server", "time": "run on after", "start": "cannot run"}
    with pytest.raises(ConfigError, match=said[broken]):
        await check(Holed, SandboxOptions(seconds=600, readable=(str(tmp_path),)))


async def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="Choose one of monty, sandlock, bubblewrap, container"):
        await open_sandboxes("plain")


async def test_a_missing_program_is_named() -> None:
    with pytest.raises(ConfigError, match="no-such-bwrap, which is not installed: apt install bubblewrap"):
        await open_sandboxes("bubblewrap", SandboxOptions(bubblewrap_command="no-such-bwrap"))
    with pytest.raises(ConfigError, match="no-such-docker, which is not installed"):
        await open_sandboxes("container", SandboxOptions(container_command=("no-such-docker",)))


@pytest.mark.parametrize(("kind", "module"), [("monty", "pydantic_monty"), ("sandlock", "sandlock")])
async def test_a_missing_package_is_named(kind: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.broker.installation.is_installed", lambda name: name != module)
    with pytest.raises(ConfigError, match=r"pip install 'headway\[agents\]'"):
        await open_sandboxes(kind)


async def test_a_program_that_confines_nothing_is_found(tmp_path: Path) -> None:
    """What is called bwrap here drops all of its arguments, and runs what follows them."""
    fake = tmp_path / "bwrap"
    fake.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift\nmkdir -p /tmp\nexec "$@"\n')
    fake.chmod(0o755)
    with pytest.raises(ConfigError, match="The sandbox bubblewrap"):
        await open_sandboxes("bubblewrap", SandboxOptions(seconds=600, bubblewrap_command=str(fake)))


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("print(6 * 7)", "42"),
        ("pass", "(no output)"),
        ("print(1)\n1/0", "ZeroDivisionError"),
        ("x = 'a' * 10**10", "Error: memory"),
    ],
)
async def test_the_model_reads_what_became_of_its_code(sandbox: Sandbox, code: str, says: str) -> None:
    toolbox = Toolbox([python_tool(sandbox, PythonMathOptions())])
    call = ToolCall(id="1", name="python", arguments=json.dumps({"code": code}))
    (told,) = await toolbox.answers([call])
    assert says in told["content"]
    assert toolbox.measures["tool_errors"] == float(says not in ("42", "(no output)"))
