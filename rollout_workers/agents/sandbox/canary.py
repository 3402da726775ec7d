"""Tries a sandbox before code of a model runs in it: what must be denied to code is attempted, and must fail."""

import contextlib
import secrets
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from headway.broker.errors import ConfigError

from .base import Sandbox, SandboxOptions

SECONDS = 1.0
"""The time of the endless run."""

READS = """
try:
    print(open({path!r}).read())
except Exception as error:
    print("denied", type(error))
"""
WRITES = """
try:
    with open({path!r}, "w") as file:
        file.write("x")
except Exception as error:
    print("denied", type(error))
"""
CONNECTS = """
try:
    import socket
    socket.create_connection(("127.0.0.1", {port}), 5).close()
except Exception as error:
    print("denied", type(error))
"""


async def check(open_one: Callable[[SandboxOptions], Sandbox], options: SandboxOptions) -> None:
    """Raise ConfigError unless code runs in such a sandbox, cannot read or write a file outside it, cannot reach a
    server of this machine, and is ended when its time is up."""
    async with open_one(options) as sandbox:
        await _check_runs(sandbox)
        with tempfile.TemporaryDirectory(prefix="headway-canary-") as directory:
            await _check_files(sandbox, Path(directory))
        with _server() as server:
            ran = await sandbox.run(CONNECTS.format(port=server.getsockname()[1]))
            if "denied" not in ran.output or _is_called(server):
                raise _leaks(sandbox, "connect to a server", ran.output + ran.error)
    async with open_one(msgspec.structs.replace(options, seconds=min(SECONDS, options.seconds))) as sandbox:
        ran = await sandbox.run("while True: pass")
        if ran.outcome != "timeout":
            raise _leaks(sandbox, f"run on after its time ({ran.outcome})", ran.error)


async def _check_runs(sandbox: Sandbox) -> None:
    ran = await sandbox.run("print(6 * 7)")
    if ran.outcome != "ok" or ran.output != "42\n":
        said = (ran.error or ran.output).strip()[-1000:]
        raise ConfigError(
            f"The sandbox {sandbox.kind} cannot run code here: {ran.outcome}. {said} {REMEDIES[sandbox.kind]}"
        )


def _write_secret(directory: Path) -> tuple[Path, str]:
    """Write a file that permissions alone let anybody read and write."""
    directory.chmod(0o777)
    secret, word = directory / "secret", secrets.token_hex(16)
    secret.write_text(word)
    secret.chmod(0o666)
    return secret, word


async def _check_files(sandbox: Sandbox, directory: Path) -> None:
    secret, word = _write_secret(directory)
    written = directory / "written"
    ran = await sandbox.run(READS.format(path=str(secret)))
    if word in ran.output or "denied" not in ran.output:
        raise _leaks(sandbox, "read a file outside", ran.output + ran.error)
    ran = await sandbox.run(WRITES.format(path=str(written)))
    if written.exists():
        raise _leaks(sandbox, "write a file outside", ran.output + ran.error)
    await sandbox.run(WRITES.format(path=str(secret)))
    if secret.read_text() != word:
        raise _leaks(sandbox, "change a file outside", ran.output + ran.error)


@contextlib.contextmanager
def _server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


def _is_called(server: socket.socket) -> bool:
    try:
        server.accept()[0].close()
    except BlockingIOError:
        return False
    return True


def _leaks(sandbox: Sandbox, ability: str, said: str) -> ConfigError:
    return ConfigError(
        f"The sandbox {sandbox.kind} does not confine code here: it could {ability}. {REMEDIES[sandbox.kind]} "
        f"The code said: {said.strip()[-300:]}"
    )


REMEDIES = {
    "monty": "Install the version of pydantic-monty that Headway names: pip install 'headway[agents]'.",
    "sandlock": "It needs Linux 6.12 or newer with Landlock enabled; choose the kind monty or bubblewrap otherwise.",
    "bubblewrap": "It needs user namespaces: where a container or the system forbids them, choose monty or sandlock.",
    "container": "Pull the image first, and let this user run containers; or choose monty, sandlock or bubblewrap.",
}
