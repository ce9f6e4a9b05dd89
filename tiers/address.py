"""Addresses of engines that run elsewhere: which can be used, and which are the same."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from ipaddress import ip_address
from urllib.parse import urlsplit

import httpx

USUAL_PORTS = {"http": 80, "https": 443}


def wrong_with(url: str) -> str | None:
    """Return why paths of vLLM's API cannot be appended to an address; None if they can."""
    try:
        httpx.URL(url)
        parts = urlsplit(url)
        port = parts.port
    except (httpx.InvalidURL, ValueError):
        return "not an address"
    if (
        not url.isprintable()
        or " " in url
        or parts.scheme not in {"http", "https"}
        or not parts.hostname
        or port == 0
    ):
        return "not an address with http:// or https:// and a host"
    if parts.username is not None or parts.password is not None:
        return "user and password do not belong here, where GET /tiers shows them: engine.api_key holds the engines' key"
    if "?" in url or "#" in url:
        return "it may not have a query or a fragment"
    if parts.path.rstrip("/").endswith("/v1"):
        return "the address ends with /v1, which QARR adds itself"
    return None


# The roster compares the addresses of all engines every second.
@lru_cache(1024)
def normalised(url: str) -> str:
    """Return a text that is equal for equal addresses, also where a host has several or the port is not written."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    with suppress(ValueError):
        host = str(ip_address(host))
    if host == "localhost":
        host = "127.0.0.1"
    port = parts.port or USUAL_PORTS.get(parts.scheme, 80)
    return f"{parts.scheme}://{host}:{port}{parts.path.rstrip('/')}"
