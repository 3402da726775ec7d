"""Headway learns a server's properties from the answers of servers of each kind."""

from pathlib import Path

from headway.broker.connection.server_traits import ServerTraits, inspect
from headway.broker.server.access import Role
from headway.broker.server.embedded import EmbeddedServer

from .topologies import ask, free_port


async def test_a_server_without_users(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path, port=free_port()) as server:
        assert await inspect(server.url) == ServerTraits(is_open=True, evictions=(), has_file=True)
        ask(server, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        ask(server, "CONFIG", "SET", "appendonly", "no")
        assert await inspect(server.url) == ServerTraits(is_open=True, evictions=("allkeys-lru",), has_file=False)


async def test_users_beside_a_default_user_that_was_left_on(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path, port=free_port()) as server:
        ask(server, "ACL", "SETUSER", "ali", "on", ">sesame", "~*", "+@all")
        ali = server.url.replace("://", "://ali:sesame@")
        assert (await inspect(ali)).is_open
        ask(server, "CONFIG", "SET", "requirepass", "x")
        assert not (await inspect(f"{ali}?db=0")).is_open
        assert not (await inspect(f"{server.url}?username=ali&password=sesame")).is_open


async def test_a_server_with_users(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path, port=free_port(), has_users=True) as server:
        assert await inspect(server.url_of(Role.LEARNER)) == ServerTraits(is_open=False, evictions=(), has_file=True)
        assert await inspect(server.url_of(Role.OBSERVER)) == ServerTraits(is_open=False, evictions=None, has_file=None)


async def test_a_socket_is_guarded_by_its_modes(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as server:
        assert not (await inspect(server.url)).is_open
