"""A supervised worker has its engine's packages imported before it imports its own."""

import os
import subprocess
import sys

import pytest

from deploy.launch.preloading import ENGINE


@pytest.mark.vllm
def test_vllm_is_being_imported_before_the_workers_own_modules() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "deploy", "worker", "--help"]
    told = subprocess.run(
        command, env={**os.environ, ENGINE: "vllm"}, check=True, capture_output=True, text=True, timeout=60
    ).stderr
    imported = [line.rsplit("|", 1)[-1].strip() for line in told.splitlines() if line.startswith("import time:")]
    assert imported.index("multiprocessing.popen_forkserver") < imported.index("deploy.cli.commands.roles")


def test_other_processes_import_no_engine() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "deploy", "--help"]
    environment = {name: value for name, value in os.environ.items() if name != ENGINE}
    told = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=60).stderr
    assert "deploy.cli.main" in told
    assert "multiprocessing.popen_forkserver" not in told
