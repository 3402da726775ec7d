"""The embedded server makes its users once, keeps their passwords secret, and obeys no other client."""

import os
import stat
from pathlib import Path

import pytest

from headway.broker import Broker, open_broker
from headway.broker.errors import BrokerError, BrokerUnavailableError, HeadwayError
from headway.broker.server.access import Role
from headway.broker.server.embedded import EmbeddedServer

from .scenario import Scenario, begin, rules
from .topologies import free_port


def open_server(directory: Path, *, has_port: bool) -> EmbeddedServer:
    return EmbeddedServer(directory, port=free_port() if has_port else None, has_users=True)


async def opened(server: EmbeddedServer, role: Role) -> Broker:
    return await open_broker(server.url_of(role), "r", timeout_s=2)


@pytest.mark.parametrize("has_port", [True, False])
async def test_configuration_prompts_and_weights_are_the_learners_alone(tmp_path: Path, has_port: bool) -> None:
    with open_server(tmp_path / "server", has_port=has_port) as server:
        learner, worker, observer, scorer = [await opened(server, role) for role in Role]
        run = await begin(learner, rules(1))
        await Scenario(worker, run.claim).generate(4, 0)
        assert (await observer.status.snapshot()).announced is not None
        for broker in (worker, observer, scorer):
            for key in ("config", "prompt:x", "manifest:announced", "model"):
                with pytest.raises(BrokerError, match="may not do this"):
                    await broker._connection.execute("SET", broker._connection.keys(key), "x")
        for broker in (learner, worker, observer, scorer):
            await broker.close()


@pytest.mark.parametrize("has_port", [True, False])
async def test_strangers_are_refused(tmp_path: Path, has_port: bool) -> None:
    with open_server(tmp_path / "server", has_port=has_port) as server:
        for url in (server.url, server.url.replace("://", "://headway-learner:guess@")):
            with pytest.raises(BrokerUnavailableError, match="refuses our user or password"):
                await open_broker(url, "r", timeout_s=2)


def test_passwords_are_their_owners_alone_and_shown_nowhere(tmp_path: Path) -> None:
    with open_server(tmp_path / "server", has_port=True) as server:
        folder = tmp_path / "server" / "passwords"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        passwords = {path.name: path.read_text().strip() for path in folder.iterdir()}
        assert sorted(passwords) == sorted(Role)
        assert all(stat.S_IMODE((folder / role).stat().st_mode) == 0o600 for role in Role)
        elsewhere = b"".join(path.read_bytes() for path in (tmp_path / "server").glob("*") if path.is_file())
        for role, password in passwords.items():
            assert len(password) >= 32
            assert password not in server.url_of(Role(role))
            assert password.encode() not in elsewhere


async def test_a_server_that_is_started_again_takes_the_same_passwords(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "server", has_users=True)
    passwords = []
    for _ in range(2):
        with server:
            await (await opened(server, Role.WORKER)).close()
            passwords.append((tmp_path / "server" / "passwords" / "worker").read_text())
            os.kill(server.pid, 9)
    assert passwords[0] == passwords[1]


async def test_a_password_that_was_deleted_is_another_one_afterwards(tmp_path: Path) -> None:
    server, file = EmbeddedServer(tmp_path / "server", has_users=True), tmp_path / "server" / "passwords" / "worker"
    with server:
        before = file.read_text()
    file.unlink()
    with server:
        await (await opened(server, Role.WORKER)).close()
        assert file.read_text() != before
        with pytest.raises(BrokerUnavailableError, match="refuses our user or password"):
            await open_broker(server.url.replace("://", f"://headway-worker:{before.strip()}@"), "r", timeout_s=2)


def test_passwords_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "passwords").touch()
    with pytest.raises(HeadwayError, match=r"passwords cannot be kept in .*choose another directory"):
        EmbeddedServer(tmp_path, has_users=True).start()


def test_a_server_of_before_there_were_users_is_not_taken_over(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as before:
        with pytest.raises(HeadwayError, match=r"A server with other passwords than those in .* already runs on"):
            EmbeddedServer(tmp_path, has_users=True).start()
        assert before.is_alive()
        assert before.url_of(Role.WORKER) == before.url
