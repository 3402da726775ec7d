"""Every page of the site fits a phone in headless Chromium, has a dark form, and loads nothing from other hosts."""

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
