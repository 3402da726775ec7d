"""Finds out what is installed on this machine, without importing it."""

from importlib import metadata
from importlib.util import find_spec

import msgspec


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


def version_of(distribution: str) -> str | None:
    """Returns the version of an installed distribution, or None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
