"""A headless Chromium, for tests that run where it and its driver are installed."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NEEDS_CHROMIUM = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("playwright") is None, reason="asks for it: make test-browser"),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium"),
]


@contextmanager
def chromium() -> Iterator[Any]:
    """Yield Playwright's browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()
