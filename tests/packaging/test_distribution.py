"""A release: a source archive, the wheel built from it, and an environment that has only this wheel of Headway and what
`pip install headway` brings."""

import json
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from headway import __version__
from headway.broker.connection.function_library import verb_flags

REPOSITORY = Path(__file__).parents[2]
ROOMS = ["algorithms", "broker", "deploy", "learner", "rollout_workers", "weightsync"]
OF_THE_PACKAGE = {"headway/__init__.py", "headway/__main__.py", "headway/py.typed"}
SHIPPED_SUFFIXES = {".py", ".lua", ".yaml", ".json", ".html", ".css", ".js", ".sh", ".typed"}
SHADOW = "raise SystemExit('a module of the user was imported in the place of ours')"
FOR_SOME_USERS = {"matplotlib": "plots", "textual": "top", "reasoning-gym": "reasoning-gym"}
"""Packages that not all users need, and their extras."""
MATHEMATICS = """
import pkgutil
import headway.algorithms as rooms
for found in pkgutil.walk_packages(rooms.__path__, "headway.algorithms."):
    __import__(found.name)
"""


@dataclass(frozen=True)
class Installation:
    """A virtual environment that holds the wheel, and finds the dependencies where the tests find them; packages that
    `pip install headway` does not bring, it does not find."""

    programs: Path
    elsewhere: Path
    """A directory outside of the repository."""

    def run(self, program: str, *arguments: str, cwd: Path | None = None) -> str:
        """Return the output of `program` of this environment. Raises CalledProcessError if it fails."""
        done = self.attempt(program, *arguments, cwd=cwd)
        sys.stderr.write(done.stderr)
        done.check_returncode()
        return done.stdout

    def attempt(self, program: str, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run `program` of this environment, which may fail."""
        command = [str(self.programs / program), *arguments]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HEADWAY_"))}
        return subprocess.run(
            command, cwd=cwd or self.elsewhere, env=environment, capture_output=True, text=True, check=False
        )


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
    here = metadata.distribution("torch").locate_file("")
    (packages / "dependencies.pth").write_text(f"{here}\n{_without(_base_dependencies())}\n")
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


@pytest.mark.slow
def test_the_rooms_are_imported_from_the_wheel(installation: Installation) -> None:
    files = installation.run(
        "python", "-c", f"from headway import {','.join(ROOMS)}; print({'.__file__,'.join(ROOMS)}.__file__)"
    )
    assert all(Path(file).is_relative_to(installation.programs.parent) for file in files.split())


def test_the_command_answers_with_its_version_and_its_help(installation: Installation) -> None:
    assert installation.run("headway", "--version") == f"headway {__version__}\n"
    assert "plan-memory" in installation.run("headway", "--help")


def test_what_only_some_users_need_is_an_extra(wheel: Path) -> None:
    told = _metadata(wheel)
    needed = [Requirement(line) for line in told.get_all("Requires-Dist", [])]
    assert not set(FOR_SOME_USERS) & {one.name for one in needed if one.marker is None}
    for package, extra in FOR_SOME_USERS.items():
        assert extra in told.get_all("Provides-Extra", [])
        assert any(one.name == package and f"'{extra}'" in str(one.marker).replace('"', "'") for one in needed)


def test_a_command_without_its_extra_says_how_to_install_it(installation: Installation) -> None:
    refused = installation.attempt("headway", "top")
    assert refused.returncode == 1
    assert "needs textual, which is not installed. pip install 'headway[top]'." in " ".join(refused.stderr.split())
    assert "Traceback" not in refused.stderr


@pytest.mark.slow
def test_the_mathematics_needs_torch_alone(installation: Installation) -> None:
    others = "".join(f"sys.modules['headway.{room}'] = None; " for room in ROOMS if room != "algorithms")
    installation.run("python", "-W", "ignore", "-c", f"{_without(['torch'])}; {others}{MATHEMATICS}")


@pytest.mark.slow
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
    said = installation.run(
        "headway", "run", "arithmetic.yaml", *short, "rewards=[{kind: 'deploy:of_length'}]", cwd=home
    )
    assert "There is no plot, because matplotlib is not installed. pip install 'headway[plots]'." in said
    (metrics,) = home.glob("runs/*/metrics.jsonl")
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert max(step["step"] for step in steps if "step" in step) >= 1


def test_every_verb_of_the_broker_is_shipped(installation: Installation) -> None:
    listing = "from headway.broker.connection.function_library import verb_flags; print(*verb_flags())"
    assert installation.run("python", "-c", listing).split() == [*verb_flags()]


def _build(kind: str, directory: Path, output: Path) -> Path:
    """Return the only file that hatchling makes of `directory`, without a network."""
    _python("-m", "hatchling", "build", "--target", kind, "--directory", str(output), cwd=directory)
    (made,) = output.iterdir()
    return made


def _python(*arguments: str, cwd: Path = REPOSITORY) -> None:
    subprocess.run([sys.executable, *arguments], cwd=cwd, stdout=subprocess.DEVNULL, check=True)


def _metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as opened:
        return Parser().parsestr(opened.read(f"headway-{__version__}.dist-info/METADATA").decode())


def _base_dependencies() -> Sequence[str]:
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"]


def _without(requirements: Iterable[str]) -> str:
    """Return a line of Python by which no installed package is found but the required ones, and what these require."""
    kept = _closure(requirements)
    hidden = sorted(
        module
        for module, distributions in metadata.packages_distributions().items()
        if module != "headway" and not kept & {canonicalize_name(name) for name in distributions}
    )
    return f"import sys; sys.modules.update(dict.fromkeys({hidden}))"


def _closure(requirements: Iterable[str]) -> set[str]:
    """Return the distributions that pip installs for the requirements."""
    found, waiting = set[tuple[str, str]](), [(Requirement(one), "") for one in requirements]
    while waiting:
        required, extra = waiting.pop()
        if required.marker is not None and not required.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(required.name)
        for asked in {"", *required.extras} - {asked for known, asked in found if known == name}:
            found.add((name, asked))
            try:
                waiting += [(Requirement(line), asked) for line in metadata.requires(name) or ()]
            except metadata.PackageNotFoundError:  # what a CPU's torch does without
                continue
    return {name for name, _ in found}
