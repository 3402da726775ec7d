"""What is installed on this machine, asked without importing any of it."""

from importlib import metadata
from importlib.util import find_spec

import msgspec


class TorchFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What torch says of itself."""

    version: str = ""
    """Empty where torch does not import."""
    problem: str = ""
    """Why torch does not import."""
    gpus: tuple[str, ...] = ()
    """Names of the GPUs that torch can use."""
    collectives: tuple[str, ...] = ()
    """Those of gloo, nccl and ucc that this build of torch has."""


def is_installed(module: str) -> bool:
    """Whether `module` could be imported."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a parent of it
        return False


def version_of(distribution: str) -> str | None:
    """The version of an installed distribution; None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
