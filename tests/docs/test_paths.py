"""Whatever a page names in the repository is there."""

import pytest

from .pages import NAMED_FILE, NAMED_FOLDER, ROOMS, ROOT, markdown_pages, room_page, tracked_files

OF_USERS = {"my_rewards.py", "my_prompts.py"}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_s_page_names_files_and_folders_of_the_room(room: str) -> None:
    page = room_page(room)
    missing = {
        name for name in (*NAMED_FILE.findall(page), *NAMED_FOLDER.findall(page)) if not (ROOT / room / name).exists()
    }
    assert not missing


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_s_page_names_all_its_sub_rooms(room: str) -> None:
    sub_rooms = {path.parent.name for path in (ROOT / room).glob("*/*.*") if path.suffix in (".py", ".lua", ".yaml")}
    assert not {name for name in sub_rooms if f"{name}/" not in room_page(room)}


def test_every_file_that_a_page_names_exists() -> None:
    files = tracked_files()
    ends = {
        path[index:] for path in files for index in (0, *(i + 1 for i, c in enumerate(path) if c == "/"))
    } | OF_USERS
    named = {(page.name, name) for page in markdown_pages() for name in NAMED_FILE.findall(page.read_text())}
    assert not sorted((page, name) for page, name in named if name not in ends)
