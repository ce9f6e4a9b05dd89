"""A trace collector: takes OTLP over HTTP and keeps the spans."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True, slots=True)
class Span:
    """One received span; ids in hexadecimal, ``parent`` empty for a root."""

    name: str
    trace_id: str
    span_id: str
    parent: str
    service: str
    attributes: dict[str, Any]


@dataclass(slots=True)
class Collector:
    """Listens on a free loopback port until closed.

    Attributes:
        viewer: The base URL of another collector that gets everything too.
    """

    spans: list[Span] = field(default_factory=list)
    viewer: str | None = None
    _server: ThreadingHTTPServer | None = None

    def start(self) -> str:
        """Listen; return the endpoint's base URL."""
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["content-length"]))
                collector.take(ExportTraceServiceRequest.FromString(data))
                if collector.viewer is not None:
                    httpx.post(
                        f"{collector.viewer}/v1/traces",
                        content=data,
                        headers={"content-type": "application/x-protobuf"},
                        trust_env=False,
                    ).raise_for_status()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.end_headers()
                self.wfile.write(ExportTraceServiceResponse().SerializeToString())

            def log_message(self, *_args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def take(self, request: ExportTraceServiceRequest) -> None:
        for resource_spans in request.resource_spans:
            resource = _attributes(resource_spans.resource.attributes)
            for scope in resource_spans.scope_spans:
                for span in scope.spans:
                    received = Span(
                        name=span.name,
                        trace_id=span.trace_id.hex(),
                        span_id=span.span_id.hex(),
                        parent=span.parent_span_id.hex(),
                        service=str(resource.get("service.name", "")),
                        attributes=_attributes(span.attributes),
                    )
                    self.spans.append(received)

    def trace(self, trace_id: str, *, until: int, timeout_s: float = 30) -> list[Span]:
        """Wait for a trace to have ``until`` spans; return those that it has then, or at the timeout."""
        deadline = time.monotonic() + timeout_s
        while True:
            spans = [span for span in self.spans if span.trace_id == trace_id]
            if len(spans) >= until or time.monotonic() > deadline:
                return spans
            time.sleep(0.1)

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


def _attributes(pairs: Any) -> dict[str, Any]:
    return {
        pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "string_value")
        for pair in pairs
    }
