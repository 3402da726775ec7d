"""`make test-extern` names the tools that are missing, and a test that it runs fails where it would be skipped."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SKIPPED = """
import pytest


def test_without_the_tool():
    pytest.skip("promtool is not installed")
"""


def test_the_missing_tools_are_named(tmp_path: Path) -> None:
    (tmp_path / "make").symlink_to(shutil.which("make") or "make")
    (tmp_path / "promtool").write_text("#!/bin/sh\n")
    (tmp_path / "promtool").chmod(0o755)
    answer = subprocess.run(
        ["make", "extern-tools"], cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 2
    assert " chromium kubectl\n" in answer.stdout
    assert " promtool" not in answer.stdout


def test_a_skip_fails_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "test_tool.py").write_text(SKIPPED)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", f"--rootdir={tmp_path}", str(tmp_path)]
    codes = {}
    for option in ([], ["--no-skips"]):
        answer = subprocess.run([*command, *option], cwd=ROOT, capture_output=True, text=True, check=False)
        codes[bool(option)] = answer.returncode
        assert ("promtool is not installed" in answer.stdout) == bool(option)
    assert codes == {False: 0, True: 1}
