"""A supervised worker has its engine's packages imported before it imports its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headway.deploy.launch.engine_preload import ENGINE

WORKER = ("-X", "importtime", "-m", "headway", "worker", "--broker", "unix:///nowhere", "--run", "r", "--name", "a b")
"""A worker that ends once all of its own modules are imported: its name is refused."""


def imports_of_a_worker(tmp_path: Path, **environment: str) -> list[str]:
    """Return the modules that it imported, in order."""
    others = {name: value for name, value in os.environ.items() if name != ENGINE}
    run = subprocess.run(
        [sys.executable, *WORKER],
        env={**others, "TMPDIR": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode != 0
    assert "a b" in run.stderr
    return [line.rsplit("|", 1)[-1].strip() for line in run.stderr.splitlines() if line.startswith("import time:")]


@pytest.mark.vllm
def test_vllm_is_being_imported_before_the_workers_own_modules(tmp_path: Path) -> None:
    imported = imports_of_a_worker(tmp_path, **{ENGINE: "vllm"})
    assert imported.index("multiprocessing.popen_forkserver") < imported.index("headway.deploy.roles.standalone")
    assert list(tmp_path.glob("pymp-*")) == [], "multiprocessing's own end was left out"


def test_a_worker_whose_engine_is_not_known_imports_none(tmp_path: Path) -> None:
    imported = imports_of_a_worker(tmp_path)
    assert "headway.deploy.roles.standalone" in imported
    assert "multiprocessing.popen_forkserver" not in imported
