"""Every path that a page of the repository names exists."""

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from .pages import NAMED_FILE, NAMED_FOLDER, ROOMS, ROOT, markdown_pages, room_page, tracked_files

OF_USERS = {"my_rewards.py", "my_prompts.py"}
IN_EVERY_ROOM = {"__init__.py", "base.py", "config.py"}
BLOCK = re.compile(r"\n\s*\n|\n(?=\s*(?:[-|#]|\d+\. ))")
CODE = re.compile(r"`([^`]+)`")
PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)*/?")
REPOSITORY_FILE = re.compile(r".*\.(?:py|lua|mk|yaml|toml|md|txt)")


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_s_page_names_files_and_folders_of_the_room(room: str) -> None:
    """A path of another room begins with that room's name."""
    page = room_page(room)
    named = (*NAMED_FILE.findall(page), *NAMED_FOLDER.findall(page))
    bases = {name: ROOT if name.split("/")[0] in ROOMS else ROOT / room for name in named}
    assert not {name for name, base in bases.items() if not (base / name).exists()}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_s_page_names_all_its_sub_rooms(room: str) -> None:
    sub_rooms = {path.parent.name for path in (ROOT / room).glob("*/*.*") if path.suffix in (".py", ".lua", ".yaml")}
    assert not {name for name in sub_rooms if f"{name}/" not in room_page(room)}


def test_a_sub_room_s_page_names_files_that_lie_there() -> None:
    """A name lies below the sub-room or in its room; a path of another room begins with that room's name."""
    sub_rooms = [
        ROOT / path for path in tracked_files() if path.endswith("/__init__.py") and path.split("/")[0] in ROOMS
    ]
    missing = {
        (str(page.parent.relative_to(ROOT)), name)
        for page in sub_rooms
        for name in NAMED_FILE.findall(room_page(str(page.parent.relative_to(ROOT))))
        if not any((base / name).exists() for base in (page.parent.parent, ROOT)) and not any(page.parent.rglob(name))
    }
    assert not missing


@pytest.mark.parametrize("page", markdown_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    """A bare file name lies in the folder of the path before it in its paragraph, row or list item."""
    assert not list(_missing_paths(page.read_text(), _paths()))


def _missing_paths(page: str, repository: set[str]) -> Iterator[str]:
    for block in BLOCK.split(re.sub(r"^```.*?^```", "", page, flags=re.M | re.S)):
        folder = PurePosixPath()
        for name in filter(_is_path, CODE.findall(block)):
            found = next((path for path in (name, f"{folder}/{name}") if path in repository), None)
            if found is None:
                yield name
            elif "/" in found:
                folder = PurePosixPath(found) if found.endswith("/") else PurePosixPath(found).parent


def _is_path(code: str) -> bool:
    """Whether the code is a path of the repository: not of a run's directory, a placeholder or a name in every room."""
    if PATH.fullmatch(code) is None or re.search(r"\b[A-Z]{3,}/|^runs/", code) or code in IN_EVERY_ROOM | OF_USERS:
        return False
    return code.endswith("/") or REPOSITORY_FILE.fullmatch(code) is not None


def _paths() -> set[str]:
    """Return the repository's files, and folders with a slash at their end; shipped recipes go by their names."""
    files = set(tracked_files())
    folders = {f"{folder}/" for path in files for folder in PurePosixPath(path).parents}
    return files | folders | {PurePosixPath(path).name for path in files if path.startswith("deploy/recipes/")}
