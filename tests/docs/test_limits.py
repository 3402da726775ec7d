"""The pages that a newcomer reads first stay short."""

import pytest

from .pages import ROOT, markdown_pages

LONGEST_LINE = 120


@pytest.mark.parametrize(("page", "most"), [("README.md", 130), ("ARCHITECTURE.md", 220)])
def test_a_first_page_is_short(page: str, most: int) -> None:
    assert len((ROOT / page).read_text().splitlines()) <= most


def test_no_line_of_a_page_is_longer_than_a_screen() -> None:
    long = [
        (page.name, number)
        for page in markdown_pages()
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if len(line) > LONGEST_LINE
    ]
    assert not long
