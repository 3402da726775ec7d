"""The repository's pages, and the paths that they name."""

import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("algorithms", "broker", "deploy", "learner", "rollout_workers", "weightsync")
NAMED_FILE = re.compile(r"(?<![\w/.*-])([\w-]+(?:/[\w-]+)*\.(?:py|lua|mk))\b")
NAMED_FOLDER = re.compile(r"(?<![\w/.:*-])([a-z_]+(?:/[a-z_]+)*/)(?![\w/*])")
STAND_INS = {"prompts": "{kind: arithmetic}", "rewards": "[{kind: arithmetic}]", "model": "{path: somewhere}"}


def tracked_files() -> list[str]:
    """Return the paths of all files of the repository, those that are not added yet included."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    output = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for path in output.splitlines() if (ROOT / path).exists()]


def room_page(room: str) -> str:
    """The docstring of a room."""
    return ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text())) or ""


def markdown_pages() -> list[Path]:
    """README, ARCHITECTURE, CONTRIBUTING and the site's pages."""
    return [ROOT / path for path in tracked_files() if path.endswith(".md") and path != "benchmarks/RESULTS.md"]


def whole_recipe(block: str) -> str:
    """Return a page's recipe, with stand-ins for the sections that every recipe needs and this page leaves out."""
    sections = {line.partition(":")[0] for line in block.splitlines()}
    return block + "".join(f"{name}: {value}\n" for name, value in STAND_INS.items() if name not in sections)
