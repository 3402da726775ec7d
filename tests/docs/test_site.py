"""The site is built strictly, as `make docs` does it, so a dead link fails; its pages need no other host."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .pages import ROOT

FETCHED = re.compile(r"<(?:link|script|img|iframe|source)\b[^>]*?\b(?:href|src)=[\"']?((?:https?:)?//[^\"' >]+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(directory)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"make install-dev installs what this needs\n{done.stderr}{done.stdout}"
    return directory


def test_no_page_fetches_anything_from_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 25
    assert not {(page.name, url) for page in pages for url in FETCHED.findall(page.read_text())}


def test_no_style_sheet_fetches_anything_from_another_host(site: Path) -> None:
    sheets = "".join(sheet.read_text() for sheet in site.rglob("*.css"))
    assert not re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//[^)\"']+", sheets)


def test_generated_pages_hold_what_the_code_says(site: Path) -> None:
    assert "broker.lease_ttl_s" in (site / "reference" / "configuration.html").read_text()
    assert "headway runs delete" in (site / "reference" / "commands.html").read_text()
    assert "expired_leases" in (site / "reference" / "keys.html").read_text()


def test_the_site_holds_no_code(site: Path) -> None:
    assert not list(site.rglob("*.py"))
