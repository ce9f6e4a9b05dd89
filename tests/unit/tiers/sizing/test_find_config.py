"""Where a model's configuration is found: a file, the hub's cache, the hub."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest

from tiers.errors import PlanError
from tiers.sizing.find_config import find_config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


ENVIRONMENT = (
    "HF_TOKEN",
    "HF_HUB_OFFLINE",
    "HTTP_PROXY",
    "http_proxy",
    "ALL_PROXY",
    "all_proxy",
)


class Hub(ThreadingHTTPServer):
    """A hub with one model that anybody may read, and one for which a token is needed.

    Attributes:
        requested_paths: Paths, in order.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requested_paths: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self.server.requested_paths.append(self.path)
        has_token = self.headers.get("authorization") == "Bearer right"
        allowed = has_token or self.path.startswith("/open/")
        status = 200 if allowed else 401
        if self.path.startswith("/none/"):
            status = 404
        body = b'{"model_type": "llama"}'
        if "list" in self.path:
            body = b"[1]"
        elif "broken" in self.path:
            body = b"{"
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Keep quiet."""


@pytest.fixture
def local_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
        for name in ENVIRONMENT:
            monkeypatch.delenv(name, raising=False)
        yield server
        server.shutdown()


def test_a_file_or_a_folder(tmp_path: Path, local_hub: Hub) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 7}))
    assert find_config(str(tmp_path)) == {"hidden_size": 7}
    assert find_config(str(tmp_path / "config.json")) == {"hidden_size": 7}
    assert local_hub.requested_paths == []


def test_the_hubs_cache_comes_before_the_hub(
    tmp_path: Path, local_hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the cache has is not asked for; offline, nothing is."""
    folder = tmp_path / "hub" / "models--open--cached" / "snapshots" / "1"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"cached": true}')
    assert find_config("open/cached") == {"cached": True}
    assert find_config("open/model") == {"model_type": "llama"}
    assert local_hub.requested_paths == ["/open/model/resolve/main/config.json"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(PlanError, match="HF_HUB_OFFLINE is set"):
        find_config("open/model")
    assert find_config("open/cached") == {"cached": True}


def test_a_token_is_sent(local_hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that needs one says so without it; the token is in no error."""
    with pytest.raises(PlanError, match="wants a token that may read it in HF_TOKEN"):
        find_config("closed/model")
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with pytest.raises(PlanError) as error:
        find_config("closed/model")
    assert "wrong" not in str(error.value)
    monkeypatch.setenv("HF_TOKEN", "right")
    assert find_config("closed/model") == {"model_type": "llama"}
    assert len(local_hub.requested_paths) == 3


@pytest.mark.parametrize(
    ("model", "error_text"),
    [
        ("none/model", "answered 404; check the id"),
        ("open/list", "must be a JSON object"),
        ("open/broken", "not JSON"),
        ("no-such-folder", "there is no such file or folder, and it is not an id"),
        ("folder/config.json", "there is no such file or folder"),
        ("../up", "there is no such file or folder"),
        ("a/b/c", "there is no such file or folder"),
    ],
)
def test_faults_are_told(model: str, error_text: str, local_hub: Hub) -> None:
    with pytest.raises(PlanError, match=error_text):
        find_config(model)
    assert all(".." not in path for path in local_hub.requested_paths)


def test_a_hub_that_cannot_be_reached(
    local_hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(
        PlanError, match=r"cannot be reached .*; give the model's config\.json"
    ):
        find_config("open/model")
    assert local_hub.requested_paths == []
