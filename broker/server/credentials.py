"""The embedded server's users, one for each role. Their passwords lie beside the server's data, each in a file that
only the server's own user may read.

    DIRECTORY/passwords/learner   worker   observer   scorer

They are made once, so that a server that is started again has the same ones.
"""

import os
import secrets
from pathlib import Path
from urllib.parse import quote

from headway.broker.connection.address import PASSWORD_FILE_OPTION
from headway.broker.errors import HeadwayError

from .access import Role, User, users

_FOLDER = "passwords"
_PASSWORD_BYTES = 24


def url_as(role: Role, url: str) -> str:
    """Returns the URL of an embedded server by which another role reaches it; any other URL as it is.

    The role's password file lies beside that of the role that the URL names.
    """
    for other in Role:
        name, file = f"{User(other, None, '').name}@", quote(f"/{_FOLDER}/{other}")
        if name in url and url.endswith(file):
            return url.replace(name, f"{User(role, None, '').name}@", 1).removesuffix(file) + quote(
                f"/{_FOLDER}/{role}"
            )
    return url


class Credentials:
    """The passwords below `directory`, which belongs to one server."""

    def __init__(self, directory: Path) -> None:
        self._folder = directory / _FOLDER

    def file(self, role: Role) -> Path:
        """Returns the path of the file with the role's password."""
        return self._folder / role

    def url_of(self, role: Role, url: str) -> str:
        """Returns the URL by which this role reaches the server at `url`: with its user name, and the path of its
        password file."""
        user = User(role, None, "").name
        return f"{url.replace('://', f'://{user}@', 1)}?{PASSWORD_FILE_OPTION}={quote(str(self.file(role)))}"

    def make(self) -> None:
        """Makes the files that are missing. Idempotent. Raises HeadwayError where they cannot be written."""
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._folder.chmod(0o700)
            for role in Role:
                if not self.file(role).exists():
                    self._write(role)
        except OSError as error:
            raise HeadwayError(
                f"The server's passwords cannot be kept in {self._folder} ({error.strerror or error}): make it"
                " writable, or choose another directory."
            ) from error

    def acl(self, *, is_for_7_0: bool) -> list[str]:
        """Returns lines of the server's configuration: a user for each role, and none without a password."""
        passwords = {role.value: self.file(role).read_text().strip() for role in Role}
        lines = [f"user {user.name} {' '.join(user.rules(is_for_7_0=is_for_7_0))}" for user in users(None, passwords)]
        return ["user default off", *lines]

    def _write(self, role: Role) -> None:
        """Writes a file that no process sees half-written and no other user can read."""
        partial = self._folder / f".{role}.partial"
        partial.unlink(missing_ok=True)
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(_PASSWORD_BYTES) + "\n")
        partial.rename(self.file(role))
