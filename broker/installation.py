"""Finds out what is installed on this machine, without importing it, and where its processes keep files for others."""

import os
import tempfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import msgspec

from .errors import ConfigError

SHARED_TMPDIR = "HEADWAY_SHARED_TMPDIR"
"""The variable that names this machine's directory of temporary files to a process whose TMPDIR is its own. A
supervised worker has one, which is removed with what is left in it."""


class TorchFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that torch reports of itself."""

    version: str = ""
    """The version of torch; "" where it cannot be imported."""
    problem: str = ""
    """Why torch cannot be imported, or ""."""
    gpus: tuple[str, ...] = ()
    """Names of the GPUs that torch can use."""
    collectives: tuple[str, ...] = ()
    """The ones of gloo, nccl and ucc that this build of torch has."""


def is_installed(module: str) -> bool:
    """Returns whether `module` could be imported."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def check_extra(extra: str, module: str, needed_by: str, *, name: str = "") -> None:
    """Raises ConfigError, with the command that installs it, where the package of an extra of Headway is missing.
    `needed_by` is a setting or a command; `name` is the package's, if it is not the module's."""
    if not is_installed(module):
        raise ConfigError(f"{needed_by} needs {name or module}, which is not installed. {pip_install(extra)}.")


def pip_install(extra: str) -> str:
    """Returns the command that installs an extra of Headway."""
    return f"pip install 'headway[{extra}]'"


def version_of(distribution: str) -> str | None:
    """Returns the version of an installed distribution, or None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def cache_directory() -> Path | None:
    """Returns the directory of what a user's later runs find again, by the XDG base directory specification; None for a
    user without a home, as a container may have. It need not exist."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (base if base.is_absolute() else Path.home() / ".cache") / "headway"
    except RuntimeError:
        return None


def shared_temporary_directory() -> Path:
    """Returns the directory for what is to be found by other processes of the machine, or after this one's end."""
    return Path(os.environ.get(SHARED_TMPDIR) or tempfile.gettempdir())
