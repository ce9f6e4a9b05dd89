"""The page's document: where it is served, what browsers are told to allow it, and what its markup and scripts keep to."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from router.auth.api_keys import add_key
from router.monitoring.page import SCRIPTS, WEB, compose
from router.section import SettingsError
from router.settings import load_settings
from tests.unit.router_stack import router_stack

CONTROLS = {"input", "select", "textarea"}


class Markup(HTMLParser):
    """What the tests look at in a document."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.unlabelled: list[dict[str, str | None]] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        if (
            tag in CONTROLS
            and "label" not in self._open
            and "aria-label" not in attributes
        ):
            self.unlabelled.append(attributes)
        if tag not in {"meta", "link", "input", "path", "circle", "rect", "br"}:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._open:
            while self._open.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts.setdefault(self._open[-1], []).append(data)


@pytest.fixture(scope="module")
def markup() -> Markup:
    parsed = Markup()
    parsed.feed(compose()[0])
    return parsed


def rules(policy: str) -> dict[str, str]:
    return dict(rule.split(" ", 1) for rule in policy.split("; "))


def source_of(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


@pytest.mark.anyio
async def test_the_document_and_its_headers(tmp_path: Path) -> None:
    """GET and HEAD answer one whole document; browsers run nothing but its own script, and keep it by its tag."""
    async with router_stack(tmp_path) as stack:
        answer = await stack.client.get(f"{stack.url}/")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-cache"
        policy = rules(answer.headers["content-security-policy"])
        assert policy["default-src"] == "'none'"
        assert policy["frame-ancestors"] == "'none'"
        assert policy["connect-src"] == "'self'"
        assert "unsafe" not in str(policy)
        (script,) = re.findall(r"<script>(.*?)</script>", answer.text, re.DOTALL)
        (style,) = re.findall(r"<style>(.*?)</style>", answer.text, re.DOTALL)
        assert policy["script-src"] == source_of(script)
        assert policy["style-src"] == source_of(style)
        head = await stack.client.head(f"{stack.url}/")
        assert head.status_code == 200
        assert head.content == b""
        policy_header = answer.headers["content-security-policy"]
        assert head.headers["content-security-policy"] == policy_header
        again = await stack.client.get(
            f"{stack.url}/", headers={"if-none-match": answer.headers["etag"]}
        )
        assert again.status_code == 304
        assert again.content == b""
        assert (await stack.client.post(f"{stack.url}/")).status_code == 405


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("page", "host", "keys", "on"),
    [
        ("auto", "127.0.0.1", False, True),
        ("auto", "localhost", False, True),
        ("auto", "0.0.0.0", False, False),
        ("auto", "0.0.0.0", True, True),
        ("on", "0.0.0.0", False, True),
        ("off", "127.0.0.1", False, False),
        ("off", "127.0.0.1", True, False),
    ],
)
async def test_where_the_page_is_on(
    tmp_path: Path,
    page: str,
    host: str,
    keys: bool,  # noqa: FBT001
    on: bool,  # noqa: FBT001
) -> None:
    """By itself it is there on loopback and where keys are needed; off, it is a 404 like any path that is not there."""
    keys_file = tmp_path / "keys.json"
    overrides: dict[str, Any] = {
        "server": {"page": page, "host": host},
        "auth": {"keys_file": str(keys_file)},
    }
    if keys:
        add_key(keys_file, "ci")
    async with router_stack(tmp_path, overrides) as stack:
        answer = await stack.client.get(f"{stack.url}/")
        assert answer.status_code == (200 if on else 404)
        if not on:
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.json()["type"] == "urn:qarr:problem:not-found"


@pytest.mark.anyio
async def test_the_page_is_open_and_its_data_are_not(tmp_path: Path) -> None:
    """Where keys are needed the document comes without one, and everything that it reads does not."""
    keys_file = tmp_path / "keys.json"
    key, _ = add_key(keys_file, "ci")
    async with router_stack(tmp_path, {"auth": {"keys_file": str(keys_file)}}) as stack:
        assert (await stack.client.get(f"{stack.url}/")).status_code == 200
        for path in (
            "/live",
            "/requests",
            "/traces/0",
            "/policy",
            "/tiers",
            "/admin/operations",
            "/route",
        ):
            assert (await stack.client.get(stack.url + path)).status_code == 401, path
        carried = {"authorization": f"Bearer {key}"}
        assert (
            await stack.client.get(f"{stack.url}/policy", headers=carried)
        ).status_code == 200


def test_a_mode_that_is_none_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"server\.page"):
        load_settings(None, {"server": {"page": "maybe"}})


def test_the_document_loads_nothing(markup: Markup) -> None:
    """No element refers to another document or server, and none has a handler or a style of its own."""
    for tag, attributes in markup.elements:
        assert not [
            name for name in attributes if name.startswith("on") or name == "style"
        ], tag
        address = attributes.get("src") or attributes.get("href") or ""
        assert address.startswith(("#", "/", "data:")) or not address, address
        assert not address.startswith("//")
    assert "@import" not in compose()[0]
    assert not re.findall(r"url\(", (WEB / "page.css").read_text("utf-8"))


def test_scripts_make_no_markup_of_text() -> None:
    """Nothing turns a text into markup or code: what the page shows comes from models, engines and callers."""
    forbidden = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|srcdoc|DOMParser"
    )
    for name in SCRIPTS:
        text = (WEB / f"{name}.js").read_text("utf-8")
        assert not forbidden.findall(text), name
        assert "</script" not in text, name
        # keys are for one tab
        assert "localStorage" not in text or name == "main", name
    assert {path.stem for path in WEB.glob("*.js")} == set(SCRIPTS)


def test_the_markup_can_be_used_without_eyes_or_mouse(markup: Markup) -> None:
    """One heading of the first level, landmarks, labelled controls, ids that are there once, and live regions."""
    tags = [tag for tag, _ in markup.elements]
    for tag in ("header", "main", "footer", "h1"):
        assert tags.count(tag) == 1, tag
    assert not markup.unlabelled
    ids = [attributes["id"] for _, attributes in markup.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in markup.elements:
        for name in ("aria-labelledby", "aria-describedby"):
            assert set((attributes.get(name) or "").split()) <= set(ids), attributes
    sections = [
        attributes
        for tag, attributes in markup.elements
        if tag in {"section", "dialog"}
    ]
    for attributes in sections:
        assert attributes.keys() & {"aria-label", "aria-labelledby"}
    roles = {attributes.get("role") for _, attributes in markup.elements}
    assert {"status", "alert"} <= roles
    assert dict(markup.elements)["html"]["lang"] == "en"
