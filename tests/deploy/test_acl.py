"""`headway acl`: a server takes what it prints, and the passwords are told apart from it."""

from pathlib import Path
from urllib.parse import quote

import pytest
from click.testing import CliRunner, Result

from broker import open_broker
from broker.access import Role
from broker.errors import ConfigError
from broker.server import EmbeddedServer
from deploy.cli import cli
from tests.broker.scenario import begin, rules


def acl(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["acl", *arguments])


async def test_a_server_takes_the_file(tmp_path: Path, run_name: str) -> None:
    printed = acl("--run", run_name, "--aclfile", "--redis-7.0")  # which newer ones take, too
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
    file.write_text("learner: one\nworker: two\nobserver: three\n")
    printed = acl("--passwords", str(file))
    assert printed.stderr == ""
    lines = printed.stdout.splitlines()
    assert [line.split()[:3] for line in lines] == [["ACL", "SETUSER", f"headway-{role}"] for role in Role]
    assert acl("--passwords", str(file)).stdout == printed.stdout


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
