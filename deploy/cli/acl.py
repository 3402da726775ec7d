"""`headway acl`: the rules by which a server gives each role a user of its own."""

from pathlib import Path

from headway.broker.errors import ConfigError
from headway.broker.server.access import Role, users
from headway.deploy.printing import say
from headway.deploy.recipe.parse import read_yaml


def print_acl(run: str | None, passwords: Path | None, *, as_file: bool, is_for_7_0: bool) -> None:
    """Print the rules on stdout without passwords, and newly made passwords on stderr, once."""
    given = _read(passwords) if passwords else dict[str, str]()
    for user in users(run, given):
        command = "user" if as_file else "ACL SETUSER"
        say(f"{command} {user.name} {' '.join(user.rules(is_for_7_0=is_for_7_0))}")
        if not as_file:
            say(f"CLIENT KILL USER {user.name}")  # otherwise a client that came in by the old password stays
        if user.role not in given:
            say(f"{user.name} {user.password}", to_stderr=True)


def _read(path: Path) -> dict[str, str]:
    given = read_yaml(path)
    unknown = sorted(set(given) - set(Role))
    if unknown or not all(isinstance(password, str) and password for password in given.values()):
        raise ConfigError(
            f"{path} must map roles ({', '.join(Role)}) to passwords"
            + (f", and {unknown[0]!r} is none of them." if unknown else "; put a password into quotes.")
        )
    return given
