"""A Hugging Face hub on loopback, as far as its library asks it: models in memory, one that is gated, and none of other ids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

COMMIT = "0123456789abcdef0123456789abcdef01234567"
Model = Mapping[str, bytes]


class FakeHub(ThreadingHTTPServer):
    """Serves models' files.

    Attributes:
        models: Files of each model by id.
        gated: Ids of models whose files need a token.
        broken: Names of files that the hub fails to send.
        claimed_bytes: Sizes that the hub tells instead of a file's own.
        fetched: Names of the files that were downloaded.
    """

    daemon_threads = True

    def __init__(self, models: Mapping[str, Model]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models = models
        self.gated: set[str] = set()
        self.broken: set[str] = set()
        self.claimed_bytes: dict[str, int] = {}
        self.fetched: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def size(self, model: str, name: str) -> int:
        return self.claimed_bytes.get(name, len(self.models[model][name]))


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _answer(self) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        is_about = parts[:2] == ["api", "models"]
        if is_about:
            parts = parts[2:]
        model = "/".join(parts[:2])
        if model not in self.server.models:
            self._refuse(401, "RepoNotFound", "Repository Not Found")
        elif is_about and parts[2:3] == ["tree"]:
            self._send_json(self._tree(model))
        elif is_about:
            self._send_json(self._info(model))
        elif model in self.server.gated and "authorization" not in self.headers:
            self._refuse(401, "GatedRepo", "Access to this model is restricted")
        else:
            self._send_file(model, "/".join(parts[4:]))

    def _info(self, model: str) -> dict[str, object]:
        files = [
            {"rfilename": name, "size": self.server.size(model, name)}
            for name in self.server.models[model]
        ]
        return {"id": model, "sha": COMMIT, "siblings": files}

    def _tree(self, model: str) -> list[dict[str, object]]:
        return [
            {
                "type": "file",
                "path": name,
                "oid": hashlib.sha1(content, usedforsecurity=False).hexdigest(),
                "size": self.server.size(model, name),
            }
            for name, content in self.server.models[model].items()
        ]

    def _send_file(self, model: str, name: str) -> None:
        content = self.server.models[model].get(name)
        if content is None:
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        if name in self.server.broken:
            self._refuse(400, "BadRequest", "The hub has lost this file")
            return
        if self.command == "GET":
            self.server.fetched.append(name)
        etag = hashlib.sha1(content, usedforsecurity=False).hexdigest()
        self._send(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})

    def _send_json(self, value: object) -> None:
        self._send(
            200, json.dumps(value).encode(), {"Content-Type": "application/json"}
        )

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": message})

    def _send(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


@contextmanager
def fake_hub(models: Mapping[str, Model]) -> Iterator[FakeHub]:
    """Run a hub with some models."""
    with FakeHub(models) as hub:
        thread = Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
