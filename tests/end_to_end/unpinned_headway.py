"""`headway` for a machine without a GPU, whose workers start SGLang with adapters: see `unpinned_sglang`."""

import os
import stat
import sys
from pathlib import Path

import pytest

from headway.deploy.launch import commands
from headway.deploy.launch.parent_watch import WATCHES_PARENT, end_with_parent
from tests.rollout_workers.unpinned_sglang import unpin


def write_headway(directory: Path) -> str:
    """Write a command that runs this module with the Python of this process, and return its path."""
    path = directory / "headway"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -m {__name__} "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def main() -> None:
    """Run `headway` with this process's arguments. Its workers run this module, too."""
    assert __spec__ is not None
    if WATCHES_PARENT in os.environ:
        end_with_parent()
    unpin(pytest.MonkeyPatch())
    commands.PYTHON = (sys.executable, "-m", __spec__.name, "--debug")
    from headway.deploy.cli.main import main as headway

    headway()


if __name__ == "__main__":
    main()
