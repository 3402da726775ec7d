"""Puts what a page shows, its style and its scripts into one HTML file."""

import base64
import hashlib
import html
import re
from pathlib import Path
from typing import Any

import msgspec

HERE = Path(__file__).parent
SCRIPTS = ("charts.js", "page.js")
_MARKUP = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def document(content: Any, title: str, *, is_live: bool = False) -> bytes:
    """Return the whole file. A live page may ask the server that it came from; any other asks no server."""
    style, script = _read("page.css"), "\n".join(_read(name) for name in SCRIPTS)
    connect = " connect-src 'self';" if is_live else ""
    policy = f"default-src 'none';{connect} style-src '{_digest(style)}'; script-src '{_digest(script)}'; img-src data:"
    parts = {
        "policy": policy,
        "title": html.escape(title),
        "style": style,
        "content": embedded(content),
        "script": script,
    }
    page = re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], _read("page.html"))
    return page.encode()


def embedded(content: Any) -> str:
    """Return JSON that no HTML parser takes for the end of its element."""
    text = msgspec.json.encode(content).decode()
    return "".join(_MARKUP.get(character, character) for character in text)


def _read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
