"""The HTTP server of what people and Prometheus may look at, which holds whatever its clients do.

It has no more connections, and so threads and descriptors, than MOST. The connection that came first makes room for the
newest, so idle clients keep no other client out.
"""

import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6, SHUT_RDWR
from typing import Any, Self

MOST = 32
"""Connections that one server holds."""
TIMEOUT_S = 10.0
"""The time that a client has for each part of a request, and to take each part of the answer."""


class QuietRequestHandler(BaseHTTPRequestHandler):
    """Answers one request, and logs nothing: a request's text comes from others."""

    timeout = TIMEOUT_S
    server_version, sys_version = "Headway", ""

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


class BoundedServer(ThreadingHTTPServer):
    """Answers each connection in a thread of its own."""

    daemon_threads = True
    request_queue_size = 1024  # where it is full, as the 5 of socketserver soon are, clients try again in seconds

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        """Bind the port; 0: any free one. Raises OSError."""
        self._open = dict[Any, None]()
        """The connections, the one that came first first."""
        self._changing = threading.Lock()
        self._thread: threading.Thread | None = None
        self.address_family = AF_INET6 if ":" in host else AF_INET
        super().__init__((host, port), handler)

    def start(self) -> Self:
        """Answer in a thread until `stop`."""
        self._thread = threading.Thread(target=self.serve_forever, name="http", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Free the port. Requests that are under way end by themselves."""
        self.shutdown()
        self.server_close()
        if self._thread is not None:
            self._thread.join()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection, and end the one that came first where there are too many."""
        with self._changing:
            self._open[request] = None
            crowded = list(self._open)[:-MOST]
            for connection in crowded:
                del self._open[connection]
                with suppress(OSError):
                    connection.shutdown(SHUT_RDWR)  # its thread notices, and ends
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        with self._changing:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Pass over a client that leaves in the middle of an answer."""
