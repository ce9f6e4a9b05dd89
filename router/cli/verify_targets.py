"""Which engine or file ``--reference`` and ``--candidate`` of ``qarr verify`` name."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from router.cli.client import authorization, find_router, trusted
from router.settings import load_settings
from tiers.errors import ProbeError
from tiers.spec import EngineBuild, ReplicaStatus, TierName
from tiers.verification.engine import ComparedEngine

TIER_KEY = "QARR_KEY"
CONNECT_S = 10.0
ANSWER_S = 30.0  # of short calls; long ones have limits of their own
# Requests to a tier of a router: they need no other tier's answer, and yield to the requests of users.
TIER_HEADERS = {"x-qarr-tier-policy": "require", "x-qarr-priority": "batch"}
_HOST_AND_PORT = re.compile(r"[\w.-]+:\d+(/.*)?")


class TargetError(Exception):
    """An option names nothing that can be verified."""


class TargetKind(StrEnum):
    URL = "URL"
    TIER = "tier"
    FILE = "file"


@dataclass(frozen=True, slots=True)
class Target:
    """What an option names.

    Attributes:
        option: The option, for errors.
        kind: How ``text`` is read.
        text: A URL, a tier's name or a path.
        model: The model to ask a server for; empty: its only one.
        key_variable: The environment variable with the server's API key.
    """

    option: str
    kind: TargetKind
    text: str
    model: str
    key_variable: str


class ServerTarget(NamedTuple):
    """A server's URL, and which certificates it may show."""

    url: str
    verify: ssl.SSLContext | bool


class RouterAddress:
    """Where the running router is looked for, once an option names a tier.

    Args:
        url: Its URL; empty: that of the settings.
        config: The settings' file; None: the usual one.
    """

    def __init__(self, url: str, config: Path | None) -> None:
        self._url = url
        self.config = config

    @cached_property
    def server(self) -> ServerTarget:
        """Find the router, and print its URL.

        Raises:
            SettingsError: The settings are not valid, or name no port.
        """
        url, verify = find_router(self._url, self.config)
        return ServerTarget(url, verify)


def parse_target(option: str, text: str, model: str, key_variable: str) -> Target:
    """Tell a URL, a tier's name and a file with a saved reference apart.

    Args:
        option: The option, for errors.
        text: What it names.
        model: The model to ask a server for; empty: its only one.
        key_variable: The environment variable with a server's API key; a router's is in ``QARR_KEY``.

    Raises:
        TargetError: It is none of them.
    """
    if "://" in text:
        kind = TargetKind.URL
    elif _HOST_AND_PORT.fullmatch(text):
        raise TargetError(
            f"{option} {text}: a URL begins with http:// or https://, as in http://{text}"
        )
    elif "/" in text or text.endswith(".json"):
        kind = TargetKind.FILE
    else:
        kind = TargetKind.TIER
        key_variable = TIER_KEY
        _check_tier_name(option, text)
    if model and kind is not TargetKind.URL:
        raise TargetError(
            f"{option}-model names one of several models behind a URL; {text} is a {kind.value}: leave {option}-model out"
        )
    return Target(
        option=option, kind=kind, text=text, model=model, key_variable=key_variable
    )


def _check_tier_name(option: str, text: str) -> None:
    try:
        TierName(text)
    except ValueError:
        raise TargetError(
            f"{option} {text!r} is no URL (http://HOST:PORT), no tier's name (such as precise) and no path of a saved "
            f"reference (FILE.json)"
        ) from None


def client_for(target: Target, router: RouterAddress) -> httpx.AsyncClient:
    """Return a client for a target that is no file; close it.

    Raises:
        SettingsError: The settings, which say where the router is and which certificates are trusted, are not valid.
    """
    headers: dict[str, str] = {}
    if target.kind is TargetKind.TIER:
        server = router.server
        headers = TIER_HEADERS
    else:
        server = ServerTarget(target.text, _trusted_by(target.text, router.config))
    return httpx.AsyncClient(
        base_url=server.url,
        headers=headers,
        timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S),
        limits=httpx.Limits(max_connections=None),
        trust_env=False,
        verify=server.verify,
    )


def _trusted_by(url: str, config: Path | None) -> ssl.SSLContext | bool:
    """Return which certificates a server may show: the system's, and those of the setting ``tls.ca``."""
    if not url.startswith("https:"):
        return True
    return trusted(load_settings(config), url)


async def connect(target: Target, client: httpx.AsyncClient) -> ComparedEngine:
    """Ask a target's server what it serves.

    Raises:
        ProbeError: It does not answer as vLLM does, or does not serve the model; the text says what to do.
    """
    is_tier = target.kind is TargetKind.TIER
    key = os.environ.get(target.key_variable, "")
    try:
        engine = await ComparedEngine.connect(
            client,
            str(client.base_url),
            key,
            name=target.text if is_tier else "",
            model=target.text if is_tier else target.model,
        )
    except ProbeError as error:
        raise ProbeError(
            f"{target.option}: {_first_line(error)}{_remedy(target, error)}"
        ) from error
    if not is_tier:
        return engine
    build = await _build_of_tier(client, key, target.text)
    told = {"version": build.version, "kv_cache_dtype": build.kv_cache_dtype}
    return replace(engine, identity=engine.identity.model_copy(update=told))


class _Told(BaseModel):
    """What is read of the router's ``GET /tiers``; the rest is ignored."""

    model_config = ConfigDict(frozen=True)


class _ToldBuild(_Told):
    version: str | None = None
    kv_cache_dtype: str | None = None


class _ToldReplica(_Told):
    state: str
    engine: _ToldBuild | None = None  # None: it has not told anything yet

    @property
    def build(self) -> _ToldBuild | None:
        """Return what its engine says of itself; None: it serves nothing now."""
        if self.state != ReplicaStatus.READY.value:
            return None
        return self.engine


class _ToldTier(_Told):
    tier: str
    replicas: tuple[_ToldReplica, ...] = ()


class _ToldTiers(_Told):
    tiers: tuple[_ToldTier, ...]


async def _build_of_tier(client: httpx.AsyncClient, key: str, tier: str) -> EngineBuild:
    """Return what the ready engines of a tier say of themselves, as the router has read it; None: it does not tell."""
    try:
        response = await client.get("/tiers", headers=authorization(key))
        told = _ToldTiers.model_validate_json(response.content)
    except (httpx.HTTPError, ValidationError):
        return EngineBuild(version=None, kv_cache_dtype=None)
    builds = [
        replica.build
        for told_tier in told.tiers
        if told_tier.tier == tier
        for replica in told_tier.replicas
    ]
    return EngineBuild(
        version=_all_of(build.version for build in builds if build),
        kv_cache_dtype=_all_of(build.kv_cache_dtype for build in builds if build),
    )


def _all_of(values: Iterable[str | None]) -> str | None:
    """Return a value, or several in words where replicas differ; None: none of them tells it."""
    return " and ".join(sorted({value for value in values if value})) or None


def _first_line(error: ProbeError) -> str:
    """Return an error without the rest of the page that a server other than vLLM has answered."""
    return str(error).partition("\n")[0]


def _remedy(target: Target, error: ProbeError) -> str:
    """Return what to do about an error, as the end of its text."""
    text = str(error)
    if "HTTP 401" in text or "HTTP 403" in text:
        return f". Give a valid key in the environment variable {target.key_variable}"
    if "name one of them" in text:
        return f", with {target.option}-model"
    if target.kind is TargetKind.TIER and "ConnectError" in text:
        return (
            ". Is the router running? 'qarr up' starts one, --url names another address"
        )
    if "HTTP 404" in text or "does not answer JSON" in text:
        return ". This is no vLLM server, or not its address: give the URL up to the port, as in http://HOST:8000"
    if "ConnectError" in text or "ConnectTimeout" in text:
        return ". Is the engine running, and is this its address?"
    return ""
