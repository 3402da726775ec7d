# mypy: disable-error-code="arg-type"
"""A server that dies under a run is started again with its address and data, and ends with the run in every case."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import redis

from headway.broker.connection.address import Address
from headway.broker.server.access import Role
from headway.broker.server.embedded import EmbeddedServer
from headway.deploy.launch import broker_server
from headway.deploy.launch.broker_server import MAX_RESTARTS, SupervisedServer, WriteWatch
from headway.deploy.launch.process_pool import Pool
from headway.deploy.launch.supervisor import RoleFailedError, Supervisor
from tests.broker.topologies import wait_until
from tests.full_disk import small_disk
from tests.processes import children_left

from .test_supervisor import FOREVER, await_end, await_files, role

KEY = "headway:{r}:key"


def test_a_server_that_dies_under_a_run_is_started_again_with_its_data(tmp_path: Path) -> None:
    said: list[str] = []
    learner = role(
        "learner", "import pathlib, time\nwhile not pathlib.Path('seen').exists(): time.sleep(0.05)", tmp_path
    )
    with SupervisedServer(tmp_path / "broker", said.append) as server:
        url, first = server.url_of(Role.LEARNER), server.pid
        address = Address.parse(url)

        def kill_it_and_come_back() -> None:
            client = redis.Redis.from_url(address.url, password=address.password)
            client.set(KEY, "value")
            client.execute_command("WAITAOF", 1, 0, 5000)
            os.kill(first, signal.SIGKILL)
            while True:
                try:
                    found = client.get(KEY)
                    break
                except redis.RedisError:  # it is away, or loads its data
                    pass
            client.close()
            (tmp_path / "found").write_bytes(found or b"")
            (tmp_path / "seen").touch()

        thread = threading.Thread(target=kill_it_and_come_back)
        thread.start()
        workers = [role("w", FOREVER.replace("0.05", "0.06"), tmp_path)]
        assert Supervisor([Pool.of(workers)], learner, say=lambda _: None, check=server.check).run() == 0
        thread.join()
        assert (tmp_path / "found").read_text() == "value"
        assert (server.url_of(Role.LEARNER), server.restarts) == (url, 1)
        assert server.pid != first
    (told,) = said
    assert f"(1 of {MAX_RESTARTS})" in told
    assert str(tmp_path / "broker" / "server.log") in told
    assert children_left() == []


def test_a_server_that_keeps_dying_ends_the_run_with_the_end_of_its_log(tmp_path: Path) -> None:
    with SupervisedServer(tmp_path / "broker", lambda _: None) as server:

        def die_again() -> None:
            os.kill(server.pid, signal.SIGKILL)
            await_end(server.pid)
            server.check()

        supervisor = Supervisor([], role("learner", FOREVER, tmp_path), say=lambda _: None, check=die_again)
        with pytest.raises(RoleFailedError) as caught:
            supervisor.run()
        assert server.restarts == MAX_RESTARTS
    message, _, words = str(caught.value).partition("\n")
    log = tmp_path / "broker" / "server.log"
    assert message == (
        f"The server has died again after {MAX_RESTARTS} restarts: the run has been stopped. Its log, {log}, ends with:"
    )
    assert words.splitlines() == log.read_text().splitlines()[-len(words.splitlines()) :]
    assert "Ready to accept connections" in words
    assert children_left() == []


def test_a_server_whose_disk_is_full_is_told_and_goes_on_once_there_is_room(tmp_path: Path) -> None:
    said: list[str] = []
    with small_disk(tmp_path / "disk", 8 << 20) as disk:
        if not disk.is_mount():
            pytest.skip("a limit of our own fills no disk")
        with SupervisedServer(disk / "broker", said.append) as server:
            address = Address.parse(server.url_of(Role.LEARNER))
            with redis.Redis.from_url(address.url, password=address.password) as client:
                server.check()
                (disk / "filler").write_bytes(bytes(7 << 20))
                with suppress(redis.RedisError):  # until the server refuses writes
                    while True:
                        client.set(KEY, bytes(1 << 20))
            wait_until(lambda: _checked(server) and len(said) == 1)
            (disk / "filler").unlink()
            wait_until(lambda: _checked(server) and len(said) == 2)
    assert re.match(rf"The server cannot write its data to {disk / 'broker'} \([01]\.\d MiB are free there\)", said[0])
    assert "Make room" in said[0]
    assert said[1] == "The server can write its data again."


def test_a_server_that_does_not_answer_is_not_told_and_a_failed_disk_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: object) -> None:
        raise OSError(errno.ESTALE, "stale file handle")

    said: list[str] = []
    answers = iter([None, True, False, None, False, None, True, None])
    server = EmbeddedServer(tmp_path / "broker")
    monkeypatch.setattr(shutil, "disk_usage", fails)
    monkeypatch.setattr(broker_server, "LOOK_S", 0.0)
    monkeypatch.setattr(server, "can_write", lambda: next(answers))
    watch = WriteWatch(server, said.append)
    for _ in range(8):
        watch.look()
    assert len(said) == 2
    assert said[0].startswith(f"The server cannot write its data to {tmp_path / 'broker'}, and takes no writes")
    assert said[1] == "The server can write its data again."


def _checked(server: SupervisedServer) -> bool:
    server.check()
    return True


def test_a_restarted_server_does_not_survive_a_killed_supervisor(tmp_path: Path) -> None:
    script = f"""
import os, signal, time
from pathlib import Path
from headway.deploy.launch.broker_server import SupervisedServer
with SupervisedServer(Path("broker"), print) as server:
    os.kill(server.pid, signal.SIGKILL)
    while server.restarts == 0:
        server.check()
    time.sleep(0.5)  # until the guard is at its post
    Path("pid.part").write_text(str(server.pid)); Path("pid.part").rename("pid")
    {FOREVER.replace(chr(10), chr(10) + "    ")}
"""
    supervisor = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path)
    await_files(tmp_path / "pid")
    supervisor.kill()
    supervisor.wait()
    await_end(int((tmp_path / "pid").read_text()))
