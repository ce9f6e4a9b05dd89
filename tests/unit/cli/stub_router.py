"""A server that gives prepared answers, for commands that ask a running router; and commands run in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from router.cli.main import make_app


def qarr(*args: str, stdin: str = "", **env: str) -> Result:
    """Run a command in this process; an error that it raises is in ``exception``."""
    return CliRunner().invoke(make_app(args[:1]), args, input=stdin, env=env)


class StubRouter:
    """Prepared answers by method and path.

    Attributes:
        unknown: Body for every other path; None: it names the path.
        answers: A status and a body for each; of several bodies each is given once, the last one from then on.
        asked: Method and path of each request.
        keys: Authorization header of each request.
    """

    def __init__(self, answers: dict[str, tuple[int, Any]]) -> None:
        self.answers = answers
        self.unknown: Any = None
        self.asked: list[str] = []
        self.keys: list[str | None] = []
        self.url = ""

    def answer(self, method: str, path: str, key: str | None) -> tuple[int, bytes]:
        self.asked.append(f"{method} {path}")
        self.keys.append(key)
        unknown = self.unknown or {"detail": f"there is no {path}"}
        status, body = self.answers.get(f"{method} {path}", (404, unknown))
        if isinstance(body, list):
            body = body.pop(0) if len(body) > 1 else body[0]
        return status, body if isinstance(body, bytes) else json.dumps(body).encode()


@contextmanager
def stub_router(**answers: tuple[int, Any]) -> Iterator[StubRouter]:
    stub = StubRouter(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = stub.answer(
                self.command, self.path, self.headers["authorization"]
            )
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    stub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield stub
    finally:
        server.shutdown()
        thread.join(60)
        assert not thread.is_alive()
        server.server_close()
