"""A server accepts the output of `headway acl`, and the passwords are printed apart from it."""

import asyncio
from pathlib import Path
from urllib.parse import quote

import pytest
import redis
from click.testing import CliRunner, Result

from headway.broker import open_broker
from headway.broker.errors import BrokerError, ConfigError
from headway.broker.server.access import Role
from headway.broker.server.embedded import EmbeddedServer
from headway.deploy.cli.main import cli
from tests.broker.scenario import begin, rules


def acl(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["acl", *arguments])


async def test_a_server_takes_the_file(tmp_path: Path, run_name: str) -> None:
    printed = acl("--run", run_name, "--aclfile", "--redis-7.0")  # newer servers take this, too
    passwords = dict(line.split() for line in printed.stderr.splitlines())
    assert sorted(passwords) == sorted(f"headway-{role}-{run_name}" for role in Role)
    assert not [password for password in passwords.values() if password in printed.stdout]
    file = tmp_path / "users.acl"
    file.write_text(printed.stdout)
    with EmbeddedServer(tmp_path / "server", settings=[f'aclfile "{file}"']) as server:
        name = f"headway-learner-{run_name}"
        learner = await open_broker(server.url.replace("unix://", f"unix://{name}:{quote(passwords[name])}@"), run_name)
        await begin(learner, rules(0))
        await learner.close()


def test_commands_for_all_runs_with_given_passwords(tmp_path: Path) -> None:
    file = tmp_path / "passwords.yaml"
    file.write_text("learner: one\nworker: two\nobserver: three\nscorer: four\n")
    printed = acl("--passwords", str(file))
    assert printed.stderr == ""
    commands = [line.split()[:4] for line in printed.stdout.splitlines()]
    for role, given, ended in zip(Role, commands[::2], commands[1::2], strict=True):
        assert (given[:3], ended) == (
            ["ACL", "SETUSER", f"headway-{role}"],
            ["CLIENT", "KILL", "USER", f"headway-{role}"],
        )
    assert acl("--passwords", str(file)).stdout == printed.stdout


async def test_another_password_ends_what_came_in_by_the_old_one(tmp_path: Path, run_name: str) -> None:
    with EmbeddedServer(tmp_path) as server, redis.Redis.from_url(server.url) as admin:
        old = dict.fromkeys(Role, "old")
        for password in ("old", "new"):
            file = tmp_path / "passwords.yaml"
            file.write_text("".join(f"{role}: {old[role] if role is not Role.WORKER else password}\n" for role in Role))
            if password == "new":
                intruder = redis.Redis.from_url(server.url.replace("unix://", "unix://headway-worker:old@"))
                assert intruder.ping()
            for line in acl("--passwords", str(file)).stdout.splitlines():
                admin.execute_command(*line.split())
        with pytest.raises(redis.exceptions.RedisError):
            intruder.ping()
        intruder.close()


async def test_status_says_what_to_do_where_the_users_are_of_an_earlier_version(tmp_path: Path, run_name: str) -> None:
    file = tmp_path / "passwords.yaml"
    file.write_text("learner: one\nworker: two\nobserver: three\nscorer: four\n")
    printed = acl("--passwords", str(file)).stdout
    with EmbeddedServer(tmp_path / "server") as server, redis.Redis.from_url(server.url) as admin:
        learner = await open_broker(server.url, run_name)
        await (await begin(learner, rules(0))).lease(2, 0)
        await learner.close()
        observer = server.url.replace("unix://", "unix://headway-observer:three@")
        arguments = ["status", "--broker", observer, "--run", run_name]

        for line in printed.replace(" +zscore", "").splitlines():
            admin.execute_command(*line.split())
        refused = await asyncio.to_thread(CliRunner().invoke, cli, arguments)
        assert isinstance(refused.exception, BrokerError), refused.output
        assert "Run `headway acl` of this version (with --redis-7.0 for Redis 7.0)" in str(refused.exception)

        for line in printed.splitlines():
            admin.execute_command(*line.split())
        shown = await asyncio.to_thread(CliRunner().invoke, cli, arguments)
        assert shown.exit_code == 0, shown.output


@pytest.mark.parametrize(
    ("text", "message"),
    [("leaner: x", "'leaner' is none of them"), ("worker: 123", "put a password into quotes")],
)
def test_a_wrong_file_of_passwords(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "passwords.yaml"
    file.write_text(text)
    error = acl("--passwords", str(file)).exception
    assert isinstance(error, ConfigError)
    assert message in str(error)
