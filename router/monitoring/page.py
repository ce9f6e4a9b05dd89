"""``GET /``: the page for operators. One document, assembled at start, that loads nothing else.

The document has no data: it reads the router's other endpoints as any client does, with the key that the user enters. Its
content security policy allows one script and one style sheet by digest, both from ``router/monitoring/web``, and forbids
making markup from text.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from router.auth.access import KeyStore
from router.auth.network import is_loopback
from router.server.settings import ServerSettings

WEB = Path(__file__).with_name("web")
# They share one scope, and run in this order.
SCRIPTS = (
    "base",
    "wire",
    "lanes",
    "tiers",
    "requests",
    "trace",
    "ask",
    "quality",
    "operate",
    "main",
)


class Page:
    def __init__(self, settings: ServerSettings, keys: KeyStore) -> None:
        self._settings = settings
        self._keys = keys
        self._document, self._headers = compose()

    @property
    def is_on(self) -> bool:
        """Tell whether the page is served; ``auto``: on loopback, and where its data needs a key."""
        if self._settings.page == "auto":
            return self._keys.required or is_loopback(self._settings.host)
        return self._settings.page == "on"

    async def answer(self, request: Request) -> Response:
        if not self.is_on:
            raise HTTPException(404)
        if self._headers["etag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=self._headers)
        return Response(self._document, headers=self._headers, media_type="text/html")


def compose() -> tuple[str, dict[str, str]]:
    """Return the document and its headers."""
    style = (WEB / "page.css").read_text("utf-8")
    parts = [(WEB / f"{name}.js").read_text("utf-8") for name in SCRIPTS]
    script = '(() => {\n"use strict";\n' + "\n".join(parts) + "})();\n"
    markup = (WEB / "page.html").read_text("utf-8")
    document = markup.replace("/*style*/", style).replace("/*script*/", script)
    digest = hashlib.sha256(document.encode()).hexdigest()
    headers = {
        "content-security-policy": _content_security_policy(style, script),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cache-control": "no-cache",
        "etag": f'"{digest[:32]}"',
    }
    return document, headers


def _content_security_policy(style: str, script: str) -> str:
    """Return the policy: run this script, apply this style, connect to this router, and nothing else."""
    rules = {
        "default-src": "'none'",
        "script-src": _source_of(script),
        "style-src": _source_of(style),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _source_of(text: str) -> str:
    """Return a policy's expression that allows exactly this text."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
