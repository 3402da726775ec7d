"""The Dockerfiles, without Docker: a linter reads them, and the files that they copy suffice to build Headway."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
HADOLINT = Path(sys.executable).parent / "hadolint"
PINNED = re.compile(r"^\w[\w.-]*==[\w.+!]+$")

of_each = pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)


def lint(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HADOLINT, "-"], input=text, capture_output=True, text=True, check=False)


def copied(file: Path) -> list[str]:
    """Return the sources of all COPY lines that copy from the repository."""
    lines = re.findall(r"^COPY (?!--from)(.+)$", file.read_text(), re.M)
    return [source.rstrip("/") for line in lines for source in line.split()[:-1]]


@of_each
def test_the_linter_finds_nothing(file: Path) -> None:
    said = lint(file.read_text())
    assert said.returncode == 0, said.stdout


@of_each
def test_all_that_is_copied_exists_and_is_sent_to_the_builder(file: Path) -> None:
    rules = (ROOT / ".dockerignore").read_text().splitlines()
    sent = {rule[1:] for rule in rules if rule.startswith("!")}
    assert copied(file)
    assert all((ROOT / source).exists() for source in copied(file))
    assert set(copied(file)) <= sent


@of_each
def test_headway_is_built_from_what_is_copied(file: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in copied(file):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True)
        else:
            shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=source, stdout=subprocess.DEVNULL, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    built_of = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["only-include"]
    assert {path.partition("/")[0] for path in built_of} <= set(copied(file))
    assert wheel.name.startswith("headway-")


@of_each
def test_the_last_stage_runs_as_the_user_of_the_manifests(file: Path) -> None:
    last = file.read_text().rpartition("\nFROM ")[2]
    (user, group) = re.findall(r"^USER (\d+):(\d+)$", last, re.M)[-1]
    for name in ("learner", "workers"):
        manifest = ROOT / "deploy" / "kubernetes" / "base" / name / f"{name}.yaml"
        for one in yaml.safe_load_all(manifest.read_text()):
            if "template" in one["spec"]:
                context = one["spec"]["template"]["spec"]["securityContext"]
                assert (context["runAsUser"], context["runAsGroup"]) == (int(user), int(group))


@of_each
def test_versions_are_those_of_constraints(file: Path, tmp_path: Path) -> None:
    """pip takes every package's version from constraints.txt, or the base image has the package already."""
    text = file.read_text()
    assert all("-c " in line for line in re.findall(r"pip install[^\n]*", text))
    assert "constraints.txt" in text
    program = re.search(r"awk -F '==' '(.+?)'", text)
    if program is None:
        return
    (tmp_path / "base").write_text("torch==2.11.0\nmarkupsafe==3.0.1\nheadway @ file:///x\n")
    command = ["awk", "-F", "==", program[1], tmp_path / "base", ROOT / "constraints.txt"]
    left = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    pinned = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if PINNED.match(line)]
    assert set(pinned) - set(left) == {line for line in pinned if line.startswith(("torch==", "MarkupSafe=="))}
    assert set(left) < set(pinned)


def test_headway_can_be_installed_in_the_versions_of_constraints() -> None:
    """This environment has the versions of constraints.txt, so pip asks no index."""
    options = ["--dry-run", "--no-index", "--no-build-isolation", "--quiet", "-c", "constraints.txt"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, ".[plots,reasoning-gym,top]"], cwd=ROOT, check=True
    )
