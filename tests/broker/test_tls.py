"""Encrypted connections, and passwords that are not part of the URL."""

import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from headway.broker import open_broker
from headway.broker.connection.address import PASSWORD, PASSWORD_FILE, Address, without_secrets
from headway.broker.errors import BrokerError, BrokerUnavailableError
from headway.broker.server.embedded import EmbeddedServer

from .scenario import begin, groups, rules
from .topologies import LOCAL, Proxy, ask, free_port, port_of


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path / "server", port=free_port()) as running:
        yield running


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def encrypted(server: EmbeddedServer, authority: trustme.CA) -> Iterator[Proxy]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(LOCAL).configure_cert(context)
    with Proxy(port_of(server), context) as running:
        yield running


def certificate(authority: trustme.CA, directory: Path) -> Path:
    path = directory / "ca.pem"
    authority.cert_pem.write_to_path(path)
    return path


async def test_a_run_over_tls(encrypted: Proxy, authority: trustme.CA, tmp_path: Path, run_name: str) -> None:
    known = certificate(authority, tmp_path)
    broker = await open_broker(f"rediss://{LOCAL}:{encrypted.port}?ssl_ca_certs={known}", run_name)
    run = await begin(broker, rules(0))
    await run.generate(4, 0)
    assert await run.take(0) == groups(0, 1)
    await broker.close()


@pytest.mark.parametrize("option", ["", "?ssl_ca_certs={stranger}"])
async def test_a_certificate_of_an_unknown_authority(encrypted: Proxy, tmp_path: Path, option: str) -> None:
    stranger = certificate(trustme.CA(), tmp_path)
    url = f"rediss://{LOCAL}:{encrypted.port}" + option.format(stranger=stranger)
    with pytest.raises(BrokerUnavailableError, match="certificate verify failed"):
        await open_broker(url, "r")


async def test_a_certificate_of_another_host(encrypted: Proxy, authority: trustme.CA, tmp_path: Path) -> None:
    known = certificate(authority, tmp_path)
    with pytest.raises(BrokerUnavailableError, match="certificate is not valid for 'localhost'"):
        await open_broker(f"rediss://localhost:{encrypted.port}?ssl_ca_certs={known}", "r")


@pytest.fixture
def guarded(server: EmbeddedServer) -> str:
    """Return the URL of a server that wants the password `sesame`."""
    ask(server, "ACL", "SETUSER", "ali", "on", ">sesame", "~*", "+@all")
    return f"redis://ali@{LOCAL}:{port_of(server)}"


async def test_where_a_password_may_stand(guarded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("sesame\n")
    wrong.write_text("barley\n")

    async def opens(url: str = guarded) -> bool:
        try:
            await (await open_broker(url, "r")).close()
        except BrokerUnavailableError as error:
            return "sesame" in str(error)  # the error must not show the password
        return True

    assert not await opens()
    monkeypatch.setenv(PASSWORD_FILE, str(right))
    assert await opens()
    monkeypatch.setenv(PASSWORD_FILE, str(wrong))
    assert not await opens()
    monkeypatch.setenv(PASSWORD, "sesame")
    assert await opens()  # the password goes before its file,
    monkeypatch.setenv(PASSWORD, "barley")
    assert await opens(guarded.replace("ali@", "ali:sesame@"))  # and before that the URL's
    assert await opens(guarded + "?password=sesame")


def test_a_unix_socket_is_sent_no_password_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD, "sesame")
    assert Address.parse("unix:///run/server.sock").password is None
    assert Address.parse("redis://host").password == "sesame"


async def test_a_file_of_a_password_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD_FILE, str(tmp_path / "nothing"))
    with pytest.raises(BrokerError, match=r"password cannot be read from .*nothing"):
        await open_broker("redis://127.0.0.1:1", "r")


async def test_a_password_file_in_the_url(guarded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "right file").write_text("sesame\n")
    (tmp_path / "empty").touch()
    monkeypatch.setenv(PASSWORD, "barley")
    broker = await open_broker(f"{guarded}?password_file={tmp_path}/right%20file", "r")
    await broker.close()
    with pytest.raises(BrokerError, match="the file is empty"):
        await open_broker(f"{guarded}?password_file={tmp_path}/empty", "r")
    with pytest.raises(BrokerError, match="take the URL that the server's `headway broker` prints for your role"):
        await open_broker(f"{guarded}?password_file={tmp_path}/missing", "r")
    assert Address.parse(f"unix://ali@/s?password_file={tmp_path}/right%20file&db=1").password == "sesame"
    with pytest.raises(BrokerUnavailableError, match=r"refuses our user or password .*\?password_file=FILE"):
        await open_broker(guarded, "r")


@pytest.mark.parametrize("option", ["ssl_ca_certs", "ssl_certfile", "ssl_keyfile"])
async def test_a_certificate_that_is_not_there(option: str, tmp_path: Path) -> None:
    with pytest.raises(BrokerError, match=rf"cannot be used \(No such file.*\): {option}={tmp_path}/ca.pem"):
        await open_broker(f"rediss://{LOCAL}:1?{option}={tmp_path}/ca.pem", "r")


async def test_a_file_that_is_no_certificate(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing\n")
    with pytest.raises(BrokerError, match=r"certificate that the URL of rediss://.* names cannot be used"):
        await open_broker(f"rediss://{LOCAL}:1?ssl_ca_certs={tmp_path}/ca.pem", "r")


def test_a_nodes_address_keeps_credentials_and_options() -> None:
    first = Address.parse("rediss+cluster://ali:open%20sesame@first:1?ssl_ca_certs=/ca.pem")
    assert first.is_cluster
    assert first.at("second", 2).url == "rediss://ali:open%20sesame@second:2?ssl_ca_certs=/ca.pem"
    assert first.at("::1", 3).url == "rediss://ali:open%20sesame@[::1]:3?ssl_ca_certs=/ca.pem"
    assert first.at("", 4).url == "rediss://ali:open%20sesame@first:4?ssl_ca_certs=/ca.pem"


@pytest.mark.parametrize(
    ("url", "written"),
    [
        ("redis://ali:sesame@[::1]:1/0", "redis://ali@[::1]:1/0"),
        ("rediss+cluster://:sesame@h:1?ssl_ca_certs=/ca.pem&password=x", "rediss+cluster://h:1?ssl_ca_certs=/ca.pem"),
        ("unix:///a/b.sock?db=1&ssl_password=x", "unix:///a/b.sock?db=1"),
        ("embedded", "embedded"),
    ],
)
def test_urls_are_written_down_without_secrets(url: str, written: str) -> None:
    assert without_secrets(url) == written
