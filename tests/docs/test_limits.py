"""The lines of every page fit a screen."""

from .pages import markdown_pages

LONGEST_LINE = 120


def test_no_line_of_a_page_is_longer_than_a_screen() -> None:
    long = [
        (page.name, number)
        for page in markdown_pages()
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if len(line) > LONGEST_LINE
    ]
    assert not long
