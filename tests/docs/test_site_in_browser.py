"""Every page of the site fits a phone and a small screen in headless Chromium, has a dark form and loads nothing from
other hosts; on pages of a disk the search works, too."""

import functools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.chromium import NEEDS_CHROMIUM, chromium

from .test_site import site  # noqa: F401 - a fixture

pytestmark = NEEDS_CHROMIUM

PHONE = {"width": 390, "height": 844}
LOOK = """() => {
  const brightness = (color) => color.match(/[\\d.]+/g).slice(0, 3).reduce((sum, one) => sum + Number(one), 0);
  const {backgroundColor, color} = getComputedStyle(document.body);
  const isDark = brightness(backgroundColor) < brightness(color);
  const isCovered = [...document.querySelectorAll("pre button")].some((button) => button.checkVisibility());
  return {tooWide: document.documentElement.scrollWidth - innerWidth, isDark, isCovered};
}"""

SMALL_SCREEN = {"width": 1280, "height": 800}
CUT = """() => [...document.querySelectorAll("article code")].filter((code) => code.scrollWidth > code.clientWidth
  && getComputedStyle(code).display !== "inline").map((code) => code.textContent.slice(0, 60))"""
"""It returns the code whose lines are longer than its box."""
SPILT = """() => {
  const article = document.querySelector("article"), edge = article.getBoundingClientRect().right + 1;
  const isCut = (one) => one !== article && (getComputedStyle(one).overflowX !== "visible" || isCut(one.parentElement));
  return [...article.querySelectorAll("*")]
    .filter((one) => one.getBoundingClientRect().right > edge && !isCut(one))
    .map((one) => one.textContent.slice(0, 60));
}"""
"""It returns the texts that end outside of the page's column."""


class Quiet(SimpleHTTPRequestHandler):
    """A server of files that logs nothing."""

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def url(site: Path) -> Iterator[str]:  # noqa: F811
    """The address at which the site is served."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def test_every_page_fits_a_phone_in_the_dark_and_stays_on_its_host(site: Path, url: str) -> None:  # noqa: F811
    paths = sorted(str(path.relative_to(site)) for path in site.rglob("*.html"))
    assert len(paths) > 25
    complaints: list[str] = []
    with chromium() as browser:
        page = browser.new_context(color_scheme="dark", viewport=PHONE).new_page()
        page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda asked: None if asked.url.startswith((url, "data:")) else complaints.append(asked.url))
        for path in paths:
            page.goto(url + path)
            look = page.evaluate(LOOK)
            complaints += [f"{path} is {look['tooWide']} px too wide"] * (look["tooWide"] > 0)
            complaints += [f"{path} is not dark"] * (not look["isDark"])
            complaints += [f"a button covers code on {path}"] * look["isCovered"]
    assert complaints == []


def test_code_fits_a_small_screen_on_pages_of_a_disk(site: Path) -> None:  # noqa: F811
    complaints: list[tuple[str, str]] = []
    with chromium() as browser:
        page = browser.new_context(viewport=SMALL_SCREEN).new_page()
        for path in sorted(site.rglob("*.html")):
            page.goto(path.as_uri())
            complaints += [(path.name, text) for text in page.evaluate(CUT) + page.evaluate(SPILT)]
            if page.evaluate(LOOK)["tooWide"] > 0:
                complaints.append((path.name, "is too wide"))
    assert complaints == []


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("simpo", "guides/preferences.html"),
        ("lease_ttl_s", "guides/server.html"),
    ],
)
def test_the_search_works_on_pages_of_a_disk(site: Path, asked: str, found: str) -> None:  # noqa: F811
    with chromium() as browser:
        page = browser.new_page()
        page.goto((site / "guides" / "data.html").as_uri())
        page.fill(".md-search__input", asked)
        page.wait_for_selector(".md-search-result__item a")
        links = page.eval_on_selector_all(".md-search-result__item a", "(links) => links.map((link) => link.href)")
    assert [link for link in links if link.startswith((site / found).as_uri().replace("%23", "#"))]
