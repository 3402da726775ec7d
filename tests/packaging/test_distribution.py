"""A release: a source archive, the wheel built from it, and an environment that has only this wheel of Headway."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from headway import __version__

REPOSITORY = Path(__file__).parents[2]
ROOMS = ["algorithms", "broker", "deploy", "learner", "rollout_workers", "weightsync"]
OF_THE_PACKAGE = {"headway/__init__.py", "headway/__main__.py", "headway/py.typed"}
SHIPPED_SUFFIXES = {".py", ".lua", ".yaml", ".json", ".html", ".css", ".js", ".sh", ".typed"}
SHADOW = "raise SystemExit('a module of the user was imported in the place of ours')"
SEMANTIC = r"\d+\.\d+\.\d+(-[\w.]+)?"


@dataclass(frozen=True)
class Installation:
    """A virtual environment that holds the wheel, and finds the dependencies where the tests find them."""

    programs: Path
    elsewhere: Path
    """A directory outside of the repository."""

    def run(self, program: str, *arguments: str, cwd: Path | None = None) -> str:
        """Return the output of `program` of this environment. Raises CalledProcessError if it fails."""
        command = [str(self.programs / program), *arguments]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HEADWAY_"))}
        return subprocess.run(
            command, cwd=cwd or self.elsewhere, env=environment, stdout=subprocess.PIPE, text=True, check=True
        ).stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the unpacked source archive."""
    archive = _build("sdist", REPOSITORY, tmp_path_factory.mktemp("sdist"))
    unpacked = tmp_path_factory.mktemp("source")
    with tarfile.open(archive) as opened:
        opened.extractall(unpacked, filter="data")
    return unpacked / f"headway-{__version__}"


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from the source archive, which proves that the archive holds all that a build needs."""
    return _build("wheel", source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installation(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    environment = tmp_path_factory.mktemp("environment")
    python = environment / "bin" / "python"
    _python("-m", "venv", "--without-pip", str(environment))
    _python("-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel))
    packages = next(environment.glob("lib/python*/site-packages"))
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return Installation(python.parent, tmp_path_factory.mktemp("elsewhere"))


def test_the_wheel_holds_the_rooms_with_their_scripts_and_recipes_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        names = {name for name in opened.namelist() if ".dist-info/" not in name}
    assert (
        names
        == {
            f"headway/{path.relative_to(REPOSITORY)}"
            for room in ROOMS
            for path in (REPOSITORY / room).rglob("*")
            if path.suffix in SHIPPED_SUFFIXES
        }
        | OF_THE_PACKAGE
    )
    assert any(name.endswith(".lua") for name in names)
    assert "headway/deploy/recipes/arithmetic.yaml" in names


def test_the_source_archive_holds_what_a_packager_needs_and_no_tests(source: Path) -> None:
    others = {"pyproject.toml", "PKG-INFO", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt", ".gitignore"}
    assert {path.name for path in source.iterdir()} == {".namespace", *ROOMS, *others}


def test_the_rooms_are_imported_from_the_wheel(installation: Installation) -> None:
    files = installation.run(
        "python", "-c", f"from headway import {','.join(ROOMS)}; print({'.__file__,'.join(ROOMS)}.__file__)"
    )
    assert all(Path(file).is_relative_to(installation.programs.parent) for file in files.split())


def test_the_command_answers_with_its_version_and_its_help(installation: Installation) -> None:
    assert installation.run("headway", "--version") == f"headway {__version__}\n"
    assert "plan-memory" in installation.run("headway", "--help")


def test_a_shipped_recipe_is_found_from_any_directory(installation: Installation) -> None:
    assert "parameters in float32" in installation.run("headway", "plan-memory", "arithmetic.yaml")


@pytest.mark.slow
def test_a_run_is_not_disturbed_by_files_of_the_user_that_have_names_of_ours(installation: Installation) -> None:
    home = installation.elsewhere / "home"
    for folder in ("broker", "algorithms", "weightsync"):
        (home / folder).mkdir(parents=True)
        (home / folder / "__init__.py").write_text(SHADOW)
    for name in ("learner", "rollout_workers", "headway", "queue", "types", "logging"):
        (home / f"{name}.py").write_text(SHADOW)
    (home / "deploy.py").write_text("def of_length(solution_str): return float(len(solution_str) % 2)")
    short = (
        "stages=[]",
        "learner.steps=2",
        "learner.groups_per_step=4",
        "evaluation.prompts=0",
        "run.directory=runs",
    )
    installation.run("headway", "run", "arithmetic.yaml", *short, "rewards=[{kind: 'deploy:of_length'}]", cwd=home)
    (metrics,) = home.glob("runs/*/metrics.jsonl")
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert max(step["step"] for step in steps if "step" in step) >= 1


def test_every_verb_of_the_broker_is_shipped(installation: Installation) -> None:
    listing = "from headway.broker.connection.function_library import script_names; print(*script_names())"
    shipped = {path.stem for path in (REPOSITORY / "broker" / "scripts").glob("*.lua")}
    assert set(installation.run("python", "-c", listing).split()) == {
        name for name in shipped if not name.startswith("lib_")
    }


def test_the_changelog_tells_of_this_semantic_version() -> None:
    version = __version__
    assert re.fullmatch(SEMANTIC, version)
    headings = re.findall(r"^## \[(.+?)\]", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[:2] == ["Unreleased", version]


def _build(kind: str, directory: Path, output: Path) -> Path:
    """Return the only file that hatchling makes of `directory`, without a network."""
    _python("-m", "hatchling", "build", "--target", kind, "--directory", str(output), cwd=directory)
    (made,) = output.iterdir()
    return made


def _python(*arguments: str, cwd: Path = REPOSITORY) -> None:
    subprocess.run([sys.executable, *arguments], cwd=cwd, stdout=subprocess.DEVNULL, check=True)
