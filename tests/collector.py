"""A collector of OpenTelemetry: a real HTTP server on this machine that takes OTLP and keeps the received spans."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue

Value = str | int | float


class Link(NamedTuple):
    trace: str
    span: str
    trajectory: str


class Received(NamedTuple):
    """One span, with its ids in hexadecimal; `parent` is empty for a root."""

    name: str
    trace: str
    span: str
    parent: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Value]
    resource: dict[str, Value]
    links: tuple[Link, ...]


class Collector:
    """The spans that have arrived so far, in any order."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[Received] = []
        self.paths: set[str] = set()

    @property
    def environment(self) -> dict[str, str]:
        """Return the variable that makes a process send its spans here."""
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": self.url}

    def named(self, name: str) -> list[Received]:
        return [span for span in tuple(self.spans) if span.name == name]

    def below(self, parent: Received) -> list[Received]:
        """Return the spans directly below this one, in the order in which they began."""
        found = [span for span in tuple(self.spans) if (span.trace, span.parent) == (parent.trace, parent.span)]
        return sorted(found, key=lambda span: span.start_ns)

    def take(self, body: bytes) -> None:
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = _values(of_resource.resource.attributes)
            for of_scope in of_resource.scope_spans:
                self.spans += [
                    Received(
                        name=span.name,
                        trace=span.trace_id.hex(),
                        span=span.span_id.hex(),
                        parent=span.parent_span_id.hex(),
                        start_ns=span.start_time_unix_nano,
                        end_ns=span.end_time_unix_nano,
                        attributes=_values(span.attributes),
                        resource=resource,
                        links=tuple(
                            Link(
                                link.trace_id.hex(),
                                link.span_id.hex(),
                                str(_values(link.attributes)["headway.trajectory"]),
                            )
                            for link in span.links
                        ),
                    )
                    for span in of_scope.spans
                ]


def _values(attributes: Iterable[KeyValue]) -> dict[str, Value]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value") or "") for one in attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port of 127.0.0.1."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.paths.add(self.path)
            collector.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
