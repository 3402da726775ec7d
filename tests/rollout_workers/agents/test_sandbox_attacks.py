"""What hostile code tries in a sandbox. Each attack succeeds where nothing confines it, which the tests show first."""

import os
import resource
import socket
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from headway.rollout_workers.agents.sandbox import Sandbox, SandboxOptions
from headway.rollout_workers.agents.sandbox.base import OUTCOMES
from headway.rollout_workers.agents.sandbox.container import ContainerSandbox
from tests.rollout_workers.agents.sandbox_kinds import HERE, UnconfinedSandbox, children, open_one

CPYTHON = [kind for kind in HERE if kind != "monty"]
SECRET = "3f7c0a-secret"

READS = {
    "file": "print(open({secret!r}).read())",
    "relative": "print(open('../' * 30 + {secret!r}).read())",
    "pathlib": "from pathlib import Path\nprint(Path({secret!r}).read_text())",
    "symlink": "import os\nos.symlink({secret!r}, 'link')\nprint(open('link').read())",
    "directory link": "import os\nos.symlink(os.path.dirname({secret!r}), 'd')\nprint(open('d/secret').read())",
    "copy": "import shutil\nshutil.copyfile({secret!r}, 'copy')\nprint(open('copy').read())",
    "shell": "import subprocess\nprint(subprocess.run(['cat', {secret!r}], capture_output=True).stdout)",
    "environment": "import os\nprint(dict(os.environ))",
    "variable": "import os\nprint(os.getenv('SECRET_OF_THE_WORKER'))",
    "own environment": "print(open('/proc/self/environ').read())",
    "worker's environment": "print(open('/proc/{pid}/environ').read())",
    "worker's files": "print(open('/proc/{pid}/root{secret}').read())",
    "library": "import ctypes\nprint(ctypes.CDLL(None).system(b'cat {secret}'))",
    "thread": "import threading\nthreading.Thread(target=lambda: print(open({secret!r}).read())).start()",
}
CHANGES = {
    "write": "open({victim!r}, 'w').write('changed')",
    "truncate": "import os\nos.truncate({victim!r}, 0)",
    "remove": "import os\nos.remove({victim!r})",
    "rename": "import os\nos.rename({victim!r}, {victim!r} + '2')",
    "permissions": "import os\nos.chmod({victim!r}, 0)",
    "times": "import os\nos.utime({victim!r}, (1, 1))",
    "create": "open({victim!r} + '3', 'w').write('x')",
    "directory": "import os\nos.mkdir({victim!r} + '4')",
    "link": "import os\nos.symlink('/', {victim!r} + '5')",
    "limits": "import resource\nresource.prlimit({pid}, resource.RLIMIT_CORE, (0, 0))",
}


@pytest.fixture(params=HERE)
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    async with await open_one(request.param) as opened:
        yield opened


@pytest.fixture(params=CPYTHON)
async def cpython(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    async with await open_one(request.param) as opened:
        yield opened


def unconfined(directory: Path) -> Sandbox:
    directory.mkdir(exist_ok=True)
    return UnconfinedSandbox(SandboxOptions(seconds=600, readable=(str(directory),)))


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file that anybody may read, and a variable."""
    monkeypatch.setenv("SECRET_OF_THE_WORKER", SECRET)
    path = tmp_path / "secret"
    path.write_text(SECRET)
    return str(path)


# A variable that is set later is not in a process's own environment; and capabilities are dropped even there.
@pytest.mark.parametrize("attack", [attack for attack in READS if not attack.startswith("worker")])
async def test_reading_succeeds_unconfined(attack: str, secret: str, tmp_path: Path) -> None:
    ran = await unconfined(tmp_path / "scratch").run(READS[attack].format(secret=secret, pid=os.getpid()))
    assert SECRET in ran.output


async def outputs(sandbox: Sandbox, codes: list[str]) -> str:
    """Run each code, those of CPython in one process, and return all that they print and raise."""
    if not sandbox.keeps_state:
        each = "try:\n        exec(code, {})\n    except BaseException as error:\n        print(repr(error))"
        codes = [f"for code in {codes!r}:\n    {each}"]
    rans = [await sandbox.run(code) for code in codes]
    assert {ran.outcome for ran in rans} <= {"ok", "raised"}
    return "".join(ran.output + ran.error for ran in rans)


async def test_nothing_is_read(sandbox: Sandbox, secret: str) -> None:
    said = await outputs(sandbox, [code.format(secret=secret, pid=os.getpid()) for code in READS.values()])
    assert "Error" in said
    assert SECRET not in said
    outside = ("/etc/passwd", "/etc/shadow", f"/proc/{os.getpid()}/cmdline", "/sys/power/state", "/proc/kcore")
    said = await outputs(sandbox, [f"open({path!r}, 'rb').read(1)\nprint('read', {path!r})" for path in outside])
    assert "read /" not in said


def state_of(victim: Path) -> tuple[object, ...]:
    """Describe what an attack could change, but for the time of the last reading."""
    names = sorted(os.listdir(victim.parent))
    of_file = (victim.read_text(), victim.stat().st_mode, victim.stat().st_mtime_ns) if victim.exists() else ()
    return names, of_file, resource.getrlimit(resource.RLIMIT_CORE)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    path = tmp_path / "home" / "victim"
    path.write_text("text")
    path.chmod(0o666)
    path.parent.chmod(0o777)
    return path


@pytest.mark.parametrize("attack", [attack for attack in CHANGES if attack != "limits"])
async def test_changing_succeeds_unconfined(attack: str, victim: Path, tmp_path: Path) -> None:
    before = state_of(victim)
    await unconfined(tmp_path / "scratch").run(CHANGES[attack].format(victim=str(victim), pid=os.getpid()))
    assert state_of(victim) != before


async def test_nothing_is_changed(sandbox: Sandbox, victim: Path) -> None:
    before = state_of(victim)
    said = await outputs(sandbox, [code.format(victim=str(victim), pid=os.getpid()) for code in CHANGES.values()])
    assert said.count("Error") >= len(CHANGES)
    assert state_of(victim) == before


DESCRIPTORS = """
import os
for number in range(3, 128):
    try:
        print(os.pread(number, 100, 0))
    except OSError:
        pass
"""


async def test_no_descriptor_is_inherited(sandbox: Sandbox, secret: str) -> None:
    descriptor = os.open(secret, os.O_RDONLY)
    os.set_inheritable(descriptor, True)
    try:
        assert SECRET not in (await sandbox.run(DESCRIPTORS)).output
    finally:
        os.close(descriptor)


CALLS = {
    "TCP": "s = socket.create_connection(('127.0.0.1', {port}), 5)\ns.sendall(b'x')",
    "UDP": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))",
    "unix": "s = socket.socket(socket.AF_UNIX)\ns.connect({path!r})",
    "abstract": "s = socket.socket(socket.AF_UNIX)\ns.connect('\\0' + {name!r})",
}


def servers(directory: Path) -> dict[str, socket.socket]:
    opened = {"TCP": socket.create_server(("127.0.0.1", 0)), "UDP": socket.socket(type=socket.SOCK_DGRAM)}
    opened["UDP"].bind(("127.0.0.1", opened["TCP"].getsockname()[1]))
    for kind, address in (("unix", str(directory / "server")), ("abstract", f"\0{directory.name}-{os.getpid()}")):
        opened[kind] = socket.socket(socket.AF_UNIX)
        opened[kind].bind(address)
        opened[kind].listen()
    os.chmod(directory / "server", 0o777)
    for server in opened.values():
        server.setblocking(False)
    return opened


def called(opened: dict[str, socket.socket]) -> set[str]:
    """Return the servers that somebody has called."""
    found = set()
    for kind, server in opened.items():
        try:
            if kind == "UDP":
                server.recv(10)
            else:
                server.accept()[0].close()
            found.add(kind)
        except BlockingIOError:
            pass
    return found


async def test_no_server_is_reached(sandbox: Sandbox, tmp_path: Path) -> None:
    opened = servers(tmp_path)
    addresses = {
        "port": opened["TCP"].getsockname()[1],
        "path": str(tmp_path / "server"),
        "name": f"{tmp_path.name}-{os.getpid()}",
    }
    try:
        await outputs(sandbox, ["import socket\n" + code.format(**addresses) for code in CALLS.values()])
        assert called(opened) == set()
        for code in CALLS.values():
            await unconfined(tmp_path / "scratch").run("import socket\n" + code.format(**addresses))
        assert called(opened) == set(CALLS)
    finally:
        for server in opened.values():
            server.close()


ENDLESS = {
    "loop": "while True: pass",
    "sleep": "import time\nwhile True: time.sleep(100)",
    "number": "print(len(str(10**10**8)))",
    "regex": "import re\nprint(re.match(r'(a|aa)+$', 'a' * 100 + 'b'))",
    "stopped": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "silent": "import os\nos.closerange(0, 100)\nwhile True: pass",
    "deaf": "import signal\nfor number in (2, 15, 1): signal.signal(number, signal.SIG_IGN)\nwhile True: pass",
    "recursion": "def f(): f()\nf()",
    "recursion without a limit": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "nested text": "(" * 100_000 + ")" * 100_000,
    "nested list": "x = []\nfor number in range(10**6): x = [x]\nprint(repr(x)[:5])",
    "exit": "import os\nos._exit(0)",
    "exit with a code": "import sys\nsys.exit(7)",
    "abort": "import os\nos.abort()",
    "crash": "import ctypes\nctypes.string_at(0)",
    "kill all": "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "kill the parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "kill the group": "import os, signal\nos.killpg(0, signal.SIGKILL)",
    "closed output": "import sys\nsys.stdout.close()\nsys.stderr.close()",
    "width": "print('%0999999999d' % 1)",
    "list": "x = [0] * 10**10",
}


async def test_whatever_it_does_monty_runs_on() -> None:
    for attack in ENDLESS:
        await survives(await open_one("monty"), attack)


@pytest.mark.parametrize("attack", ["loop", "kill all", "stopped"])
async def test_the_next_run_works(cpython: Sandbox, attack: str) -> None:
    await survives(cpython, attack)


@pytest.mark.slow
@pytest.mark.parametrize("attack", ENDLESS)
async def test_whatever_it_does_the_next_run_works(cpython: Sandbox, attack: str) -> None:
    await survives(cpython, attack)


async def survives(sandbox: Sandbox, attack: str) -> None:
    short = type(sandbox)(msgspec.structs.replace(sandbox.options, seconds=1))
    async with short:
        ran = await short.run(ENDLESS[attack])
        assert ran.outcome in OUTCOMES
        assert ran.outcome != "refused"
        if attack in ("loop", "silent", "stopped", "deaf", "sleep") and "Traceback" not in ran.error:
            assert ran.outcome == "timeout"
        short.options = sandbox.options
        assert (await short.run("print(6 * 7)")).output == "42\n"
    assert children() == []


BOMBS = {
    "forks": "import os\nwhile True: os.fork()",
    "forks that wait": """
        import os, time
        while True:
            try:
                if os.fork() == 0:
                    time.sleep(1000)
            except OSError:
                pass
        """,
    "threads": """
        import threading, time
        threading.stack_size(32768)
        while True:
            threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        """,
}


@pytest.mark.parametrize("bomb", BOMBS)
async def test_processes_are_bounded(cpython: Sandbox, bomb: str) -> None:
    async with type(cpython)(msgspec.structs.replace(cpython.options, seconds=5)) as bounded:
        ran = await bounded.run(textwrap.dedent(BOMBS[bomb]))
        assert ran.outcome in ("processes", "raised", "timeout")
    assert children() == []
    assert (await cpython.run("print(1)")).output == "1\n"


async def test_memory_of_all_processes_is_bounded(cpython: Sandbox) -> None:
    code = "import os, time\nfor number in range(3): os.fork()\nx = b'a' * (100 << 20)\ntime.sleep(1000)"
    assert (await cpython.run(code)).outcome == "memory"


async def test_some_processes_are_allowed(cpython: Sandbox) -> None:
    code = (
        "import subprocess, sys\nprint(subprocess.run([sys.executable, '-c', 'print(5)'], capture_output=True).stdout)"
    )
    assert (await cpython.run(code)).output == "b'5\\n'\n"


def test_a_container_is_limited() -> None:
    options = SandboxOptions(container_arguments=("--runtime=runsc",), readable=("/data",), processes=7)
    command = ContainerSandbox(options).command()
    text = " ".join(command.argv)
    assert command.argv[:2] == ["docker", "run"]
    for part in (
        "--network none", "--read-only", "--cap-drop ALL", "--security-opt no-new-privileges", "--user 65534:65534",
        f"--memory {256 << 20} --memory-swap {256 << 20}", "--pids-limit 8", "--volume /data:/data:ro",
        f"size={16 << 20}", "--runtime=runsc", "python:3.11-slim python3 -I -S",
    ):  # fmt: skip
        assert part in text
    assert command.cleanup is not None
    assert command.cleanup[:3] == ["docker", "rm", "--force"]
    assert command.cleanup[3] in command.argv


async def test_a_container_is_removed_after_each_run(tmp_path: Path) -> None:
    """What is called docker here notes how it is called, and runs the command in a sandbox's place."""
    fake, notes = tmp_path / "docker", tmp_path / "notes"
    fake.write_text(
        f'#!/bin/sh\necho "$1 $2" >> {notes}\n[ "$1" = run ] || exit 0\n'
        f'while [ "$1" != python3 ]; do shift; done\nmkdir -p {tmp_path}/s\n'
        'exec "$@" <<END\n$(head -c 16 >/dev/null)\nEND\n'
    )
    fake.chmod(0o755)
    async with ContainerSandbox(SandboxOptions(seconds=600, container_command=(str(fake),))) as opened:
        assert (await opened.run("print(1)")).outcome == "raised"
        assert (await opened.run("print(1)")).outcome == "raised"
    assert [line.split()[0] for line in notes.read_text().splitlines()] == ["run", "rm", "run", "rm"]
