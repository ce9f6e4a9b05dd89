"""The running routers that a change of the key file concerns: which they are, and whether they have taken it over."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from router.auth.api_keys import KeysError, read_content, version_of
from router.cli.client import own_url, unverified
from router.cli.common import err, plain, printable
from router.server.handover import control_path
from router.settings import Settings

FOLLOW_S = 5.0  # a router looks at the file once a second
POLL_S = 0.1
ANSWER_S = 2.0


@dataclass(frozen=True, slots=True)
class SeenRouter:
    """What a running router says of its keys.

    Attributes:
        version: Of the content of its key file; None: it has none.
    """

    url: str
    needs_keys: bool
    version: str | None
    reasons: tuple[str, ...]


class KeyFollowers:
    """The running routers of the settings: those on this machine that can be found, or the one at a URL."""

    def __init__(self, settings: Settings, url: str) -> None:
        self._path = settings.auth.keys_file
        self._urls = [url.rstrip("/")] if url else list(_urls_here(settings))
        self._context = unverified(settings)
        self._routers_before: list[SeenRouter] = []
        self._version_before: str | None = None

    def look(self) -> list[SeenRouter]:
        """Return what routers say before the change."""
        self._version_before = self._version()
        self._routers_before = []
        with self._client() as client:
            for url in self._urls:
                router = _ask(client, url)
                if router is not None:
                    self._routers_before.append(router)
        return self._routers_before

    def follow(self) -> None:
        """Wait until those routers have taken over the change, or say that this could not be seen.

        Raises:
            KeysError: A router that had the file's keys before the change still has those.
        """
        if not self._routers_before:
            addresses = ", ".join(self._urls) or "no address, since server.port is 0"
            _say(
                f"no running router was seen ({addresses}): one that reads {self._path} follows in a second"
            )
            return
        with self._client() as client:
            for router in self._routers_before:
                self._follow_router(client, router)

    def _follow_router(self, client: httpx.Client, before: SeenRouter) -> None:
        deadline = time.monotonic() + FOLLOW_S
        now: SeenRouter | None = before
        while time.monotonic() < deadline:
            now = _ask(client, before.url)
            if now is not None and now.version == self._version():
                _say(f"the router at {before.url} has taken it over")
                return
            time.sleep(POLL_S)
        if now is None:
            _say(
                f"the router at {before.url} does not answer any more: see whether it follows"
            )
            return
        reasons = "; ".join(now.reasons) or "it names no reason"
        text = printable(
            f"the router at {now.url} has not taken it over within {FOLLOW_S:g} s ({reasons})"
        )
        if before.version is not None and before.version == self._version_before:
            raise KeysError(f"{text}: the keys from before are still in force there")
        _say(
            f"{text}: it reads another file than {self._path}, or cannot read this one"
        )

    def _version(self) -> str | None:
        """Return the version of the key file; None: there is none."""
        content = read_content(self._path)
        if content is None:
            return None
        return version_of(content)

    def _client(self) -> httpx.Client:
        return httpx.Client(timeout=ANSWER_S, trust_env=False, verify=self._context)


def _say(text: str) -> None:
    err.print(plain(text))


def _urls_here(settings: Settings) -> Iterator[str]:
    """Yield the address of the settings' router, and those of this user's routers that can be taken over."""
    ports: set[int] = set()
    if settings.server.port:
        ports.add(settings.server.port)
    pattern = control_path(Path(), "*").name
    for socket in settings.server.runtime_dir.glob(pattern):
        name = re.fullmatch(r"router-(\d{1,5})", socket.stem)
        if name is not None:
            ports.add(int(name[1]))
    for port in sorted(ports):
        yield own_url(settings, port)


def _ask(client: httpx.Client, url: str) -> SeenRouter | None:
    """Return what a router says of its keys; None: no router answers there, or one of an older release."""
    try:
        answer: dict[str, Any] = client.get(f"{url}/health").json()
        keys = answer["keys"]
        return SeenRouter(
            url,
            needs_keys=bool(keys["required"]),
            version=keys["version"],
            reasons=tuple(map(str, answer["reasons"])),
        )
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError):
        return None
