"""The dashboard of a real run in headless Chromium: a worker that is killed, the keyboard, dark mode, a phone; and the
pages of runs that are over."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.broker.topologies import wait_until
from tests.chromium import NEEDS_CHROMIUM, chromium
from tests.deploy.page.pages import headway, write_run
from tests.deploy.runs import evaluation, open_record

from .recipes import write_recipe
from .terminals import Terminals
from .watching import attached

pytestmark = NEEDS_CHROMIUM

PATIENCE_MS = 240_000
DRAWN = ".grid.live table"
DRAWN_REPORT = "p:last-child:has-text('Made by Headway')"
FIRST = ["Reward", "Held-out pass rate", "Lag", "Loss"]
"""The curves that a page begins with."""
FOLLOWS = 4
"""DOM's word for a node that comes later."""
REACHABLE = "a[href], button:not(:disabled), input, select, summary, [tabindex='0']"
FOCUSED = """() => {
  const all = [...document.querySelectorAll(`REACHABLE`)].filter((one) => one.checkVisibility());
  const style = getComputedStyle(document.activeElement);
  return {place: all.indexOf(document.activeElement), of: all.length, outline: style.outlineStyle};
}""".replace("REACHABLE", REACHABLE)
BRIGHTNESS = """(property) => {
  const [red, green, blue] = getComputedStyle(document.body)[property].match(/[\\d.]+/g).map(Number);
  return red + green + blue;
}"""


def test_the_page_of_a_run_in_a_browser(terminals: Terminals) -> None:
    recipe = write_recipe(
        terminals.directory("run"),
        learner={"steps": 100_000},
        workers={"heartbeat_s": 2.0},
        broker={"lease_ttl_s": 10},
    )
    run = terminals.open("run", "run", recipe)
    directory = terminals.root / "run" / "runs" / "tiny"
    with attached(terminals, run, directory) as watch:
        watch.until_step(5)
        url = opened(terminals, directory)
        with browsing(terminals.root) as browser:
            page = browser.open(url)
            check_keyboard(page)
            assert brightness(page, "backgroundColor") > brightness(page, "color")

            check_renewals(page)
            assert titles(page)[:4] == FIRST
            is_above = "document.querySelector('figure').compareDocumentPosition(document.querySelector('.live'))"
            assert page.evaluate(is_above) == FOLLOWS
            assert page.locator(".live details.zeros:not([open]) td").count() > 0

            status = watch.until("a worker is there", lambda status: bool(status.workers))
            victim = status.workers[0]
            os.kill(victim.pid, signal.SIGKILL)
            said = f"{victim.worker} on {victim.host} is dead: its process ended"
            page.get_by_text(said).first.wait_for(timeout=PATIENCE_MS)
            page.locator("details summary", has_text="reward").first.click()
            assert page.get_by_text("Prompt", exact=True).first.is_visible()
            browser.shoot(page, "killed")

            dark = browser.open(url, color_scheme="dark")
            assert brightness(dark, "backgroundColor") < brightness(dark, "color")
            browser.shoot(dark, "dark")
            phone = browser.open(url, viewport={"width": 390, "height": 844})
            assert phone.evaluate("document.documentElement.scrollWidth") <= 390
            browser.shoot(phone, "phone")
            assert browser.complaints == []


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_pages_of_runs_begin_with_what_was_learned(count: int, width: int, tmp_path: Path) -> None:
    """However many runs there are and however long their names, each keeps its column, and the page its width."""
    runs = [str(write_run(tmp_path / f"{'long-' * 40 * (number % 2)}{number}")) for number in range(count)]
    page_of_runs = tmp_path / "page.html"
    headway("report" if count == 1 else "compare", *runs, "--output", str(page_of_runs))
    with browsing(tmp_path) as browser:
        page = browser.open(page_of_runs.as_uri(), DRAWN_REPORT, viewport={"width": width, "height": 844})
        assert titles(page)[:4] == (FIRST if count == 1 else ["Reward, mean of 5 steps", FIRST[1], "Mean lag", "Loss"])
        assert len([title for title in titles(page) if title.endswith("Parts of the reward")]) == count
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        columns = "(all) => all.map((one) => [...one.children].map((column) => column.getBoundingClientRect()))"
        found = page.eval_on_selector_all(".columns", columns)
        assert bool(found) == (count > 1)
        for boxes in found:
            assert len(boxes) == count
            assert len({box["y"] for box in boxes}) == 1
            assert all(after["x"] >= before["x"] + before["width"] for before, after in pairwise(boxes))
        rows = page.eval_on_selector_all(".by-run tr", "(rows) => rows.map((row) => row.children.length)")
        assert set(rows) == {1 + count}
        assert browser.complaints == []


def test_parts_of_a_reward_are_drawn_and_obey_no_name(tmp_path: Path) -> None:
    directory, name = write_run(tmp_path / "run"), "<img src=x onerror=alert(1)>"
    record = open_record(directory)
    for step in (5, 10):
        record.write(msgspec.structs.replace(evaluation(2, step, 0.5), reward={"exact": 0.5, name: 0.25}))
    headway("report", str(directory), "--output", str(tmp_path / "page.html"))
    with browsing(tmp_path) as browser:
        page = browser.open((tmp_path / "page.html").as_uri(), DRAWN_REPORT)
        figures = page.locator("figure")
        legend = figures.filter(has_text="Parts of the reward, held out").locator(".legend li").all_inner_texts()
        assert legend == [f"{name} 0.25", "exact 0.5"]
        trained = figures.filter(has=page.get_by_role("heading", name="Parts of the reward", exact=True))
        assert [one.split()[0] for one in trained.locator(".legend li").all_inner_texts()] == ["score", "score/exact"]
        assert page.locator("img").count() == 0
        assert browser.complaints == []


def titles(page: Any) -> list[str]:
    found: list[str] = page.locator("figure h3").all_inner_texts()
    return found


def check_keyboard(page: Any) -> None:
    """Assert that Tab reaches each control in the order of the page, and that each shows that it has the focus."""
    places, count = list[int](), 1
    while len(places) < count:
        page.keyboard.press("Tab")
        focused = page.evaluate(FOCUSED)
        assert focused["outline"] != "none", focused
        places.append(focused["place"])
        count = focused["of"]
    assert places == list(range(count))


def check_renewals(page: Any) -> None:
    """Assert that figures are renewed under a reader: a chart with the focus waits, another is replaced, text stays."""
    for reachable in ("#page figure svg", "#page details summary"):
        page.evaluate("(first) => { window.read = document.querySelector(first); window.read.focus(); }", reachable)
        page.evaluate("window.other = document.querySelectorAll('#page figure svg')[3]")
        wait_until(lambda: bool(page.evaluate("!other.isConnected")))
        assert page.evaluate("read.isConnected && document.activeElement === read")


def brightness(page: Any, property_: str) -> float:
    found: float = page.evaluate(BRIGHTNESS, property_)
    return found


def opened(terminals: Terminals, directory: Path) -> str:
    """Open a dashboard of the run, and return its address."""
    dashboard = terminals.open("dashboard", "dashboard", directory, "--port", "0", "--json")
    wait_until(lambda: "}" in dashboard.said)
    url: str = json.loads(dashboard.said.splitlines()[0])["url"]
    return url


class Browser:
    """A Chromium that notes the errors and warnings of its pages."""

    def __init__(self, chromium: Any, root: Path) -> None:
        self._chromium, self._root = chromium, root
        self.complaints: list[str] = []

    def open(self, url: str, drawn: str = DRAWN, **options: Any) -> Any:
        """Return the page, once it has drawn the run."""
        page = self._chromium.new_context(**options).new_page()
        page.on("console", self._note)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.goto(url)
        page.wait_for_selector(drawn, timeout=PATIENCE_MS)
        return page

    def _note(self, said: Any) -> None:
        if said.type in ("error", "warning"):
            self.complaints.append(said.text)

    def shoot(self, page: Any, name: str) -> None:
        """Keep a picture below the test's directory."""
        page.screenshot(path=self._root / f"{name}.png", full_page=True)


@contextmanager
def browsing(root: Path) -> Iterator[Browser]:
    with chromium() as opened:
        yield Browser(opened, root)
