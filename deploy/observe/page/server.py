"""Serves the live page of one run to browsers, and nothing else: it takes no request that changes anything."""

import hmac
import secrets
from http import HTTPStatus
from ipaddress import ip_address
from socket import gethostname
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from headway.broker.errors import ConfigError
from headway.deploy.observe.bounded_server import BoundedServer, Quiet

from .document import document
from .watching import Watcher

EVERYWHERE = {"0.0.0.0", "::", ""}
LOOPBACK = {"localhost", "127.0.0.1", "::1"}
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",  # the address holds the token
}


class PageServer(BoundedServer):
    """Serves `/`, `/page.json` and `/live.json`. Beyond loopback every request needs the token of `url`."""

    def __init__(self, watcher: Watcher, host: str, port: int) -> None:
        """Bind the port; 0: any free one. Raises ConfigError."""
        self.watcher, self._host = watcher, host
        self.token = "" if _is_loopback(host) else secrets.token_urlsafe(24)
        try:
            super().__init__(host, port, _Answer)
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(f"No page can be served at {host}, port {port}: {why}. Choose another --port.") from error

    @property
    def url(self) -> str:
        """The page's address, with the token if one is needed."""
        host = gethostname() if self._host in EVERYWHERE else self._host
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{self.server_port}/" + (f"?token={self.token}" if self.token else "")


class _Answer(Quiet):
    server: PageServer

    def do_GET(self) -> None:  # noqa: N802 - the base class finds it by this name
        """Answer with the page, or with JSON."""
        asked = urlsplit(self.path)
        query = parse_qs(asked.query)
        if not self._is_welcome(query):
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"Open the address that `headway dashboard` printed.\n")
            return
        watcher = self.server.watcher
        match asked.path:
            case "/":
                page = watcher.page
                self._send(HTTPStatus.OK, "text/html; charset=utf-8", document(page, str(page["title"]), is_live=True))
            case "/page.json":
                self._send_json(watcher.page)
            case "/live.json":
                first = query.get("first", [""])[0]
                self._send_json(watcher.window(int(first)) if first.isdecimal() and len(first) < 10 else watcher.live)
            case _:
                self._send(HTTPStatus.NOT_FOUND, "text/plain", b"There is no such page.\n")

    def _is_welcome(self, query: dict[str, list[str]]) -> bool:
        """Whether the request has the token, or, where there is none, calls this machine by a name of loopback.

        A page of another site can make a browser send requests to loopback, but only under that site's own name.
        """
        if self.server.token:
            return hmac.compare_digest(query.get("token", [""])[0].encode(), self.server.token.encode())
        return urlsplit(f"//{self.headers.get('Host', '')}").hostname in LOOPBACK

    def _send_json(self, content: Any) -> None:
        self._send(HTTPStatus.OK, "application/json", msgspec.json.encode(content))

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
