"""Engines that come and go while the router runs: a file and DNS names are looked at again and again.

A source that cannot be read changes nothing: its last engines stay. It is told once in the log, and in the fleet's notes
for as long as it lasts.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import stat
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from aiohappyeyeballs import start_connection

from tiers.address import normalised, wrong_with
from tiers.errors import DiscoveryError
from tiers.lifecycle.roster import Source

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
    from pathlib import Path

    from tiers.fleet import Fleet
    from tiers.lifecycle.roster import Members, Roster
    from tiers.spec import TierName

log = logging.getLogger(f"qarr.{__name__}")
FILE = "discovery.file"
MAX_FILE_BYTES = 1 << 20
CONNECT_S = 2.0
NEXT_ADDRESS_S = 0.25  # as RFC 8305, section 5, recommends
Family = socket.AddressFamily


async def resolve(host: str, port: int) -> list[str]:
    """Return all IPv4 and IPv6 addresses of a name; none: the name has no address.

    Raises:
        OSError: The name server does not know the name, or does not answer.
    """
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )
    except socket.gaierror as error:
        if error.errno == socket.EAI_NODATA:
            return []
        raise
    addresses = [str(socket_address[0]) for *_, socket_address in infos]
    return list(dict.fromkeys(address for address in addresses if "%" not in address))


@dataclass(frozen=True, slots=True)
class DiscoveryOptions:
    """Where engines are named.

    Attributes:
        file: JSON; None: there is none.
        names: DNS names, as addresses of engines, by tier.
        interval_s: Between two looks.
        resolve: Returns the addresses of a name.
    """

    file: Path | None = None
    names: Mapping[TierName, str] = field(default_factory=dict)
    interval_s: float = 5.0
    resolve: Callable[[str, int], Awaitable[list[str]]] = resolve


async def reachable_family(addresses: Sequence[str], port: int) -> Family | None:
    """Return the family in which one of the addresses takes a connection first; None: none does."""
    infos = [
        (family_of(address), socket.SOCK_STREAM, 0, "", (address, port))
        for address in addresses
    ]
    try:
        async with asyncio.timeout(CONNECT_S):
            connection = await start_connection(
                infos, happy_eyeballs_delay=NEXT_ADDRESS_S, interleave=1
            )
    except (OSError, TimeoutError):
        return None
    with connection:
        return Family(connection.family)


def family_of(address: str) -> Family:
    """Return the family of an address as text."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


class Discovery:
    """Tells the roster what the file and the DNS names say."""

    def __init__(self, fleet: Fleet, roster: Roster, options: DiscoveryOptions) -> None:
        self._fleet = fleet
        self._roster = roster
        self._options = options
        self._last_content: bytes | None = None
        # The family that counts, by tier, where a name has addresses of both.
        self._families: dict[TierName, Family] = {}

    def works(self) -> list[tuple[Callable[[], Coroutine[Any, Any, None]], str]]:
        """Return what runs until cancelled, with its names. Until the first look, tiers that may be named are awaited."""
        works: list[tuple[Callable[[], Coroutine[Any, Any, None]], str]] = []
        if self._options.file is not None:
            self._roster.name(Source.FILE, dict.fromkeys(self._roster.tiers, ()))
            works.append(
                (partial(self._follow_file, self._options.file), f"reading {FILE}")
            )
        for tier, url in self._options.names.items():
            self._roster.name(Source.DNS, {tier: ()}, tier)
            works.append(
                (partial(self._follow_name, tier, url), f"resolving tiers.{tier}.dns")
            )
        return works

    async def _follow_file(self, path: Path) -> None:
        while True:
            try:
                content = await asyncio.to_thread(read_file, path)
                if content != self._last_content:
                    self._roster.name(
                        Source.FILE, parse_file(content, self._roster.tiers)
                    )
                    self._last_content = content
                self._well(FILE, f"{FILE} {path}")
            except DiscoveryError as error:
                self._last_content = None
                self._wrong(FILE, f"{FILE} {path}", error)
            await asyncio.sleep(self._options.interval_s)

    async def _follow_name(self, tier: TierName, url: str) -> None:
        key = f"tiers.{tier}.dns"
        parts = urlsplit(url)
        while True:
            try:
                port = parts.port or 80
                resolved = await self._options.resolve(parts.hostname or "", port)
                addresses = await self._of_one_family(tier, url, resolved, port)
                engine_urls = tuple(at_address(url, address) for address in addresses)
                self._roster.name(Source.DNS, {tier: engine_urls}, tier)
                self._well(key, f"{key} {url}")
            except (OSError, UnicodeError) as error:
                self._wrong(
                    key,
                    f"{key} {url}",
                    DiscoveryError("it does not resolve", str(error)),
                )
            await asyncio.sleep(self._options.interval_s)

    async def _of_one_family(
        self, tier: TierName, url: str, addresses: list[str], port: int
    ) -> list[str]:
        """Return the IPv4 or the IPv6 addresses of a name: an engine that has one of each is one replica.

        Once an engine was reached, its family stays for as long as the name has addresses of it.
        """
        if len({family_of(address) for address in addresses}) < 2:  # noqa: PLR2004
            return addresses
        if tier not in self._families:
            reached = await reachable_family(addresses, port)
            if reached is not None:
                self._families[tier] = reached
                kind = "IPv6" if reached == socket.AF_INET6 else "IPv4"
                log.info(
                    "tiers.%s.dns %s has IPv4 and IPv6 addresses: its %s addresses are the engines",
                    tier,
                    url,
                    kind,
                )
        family = self._families.get(tier, socket.AF_INET)
        return [address for address in addresses if family_of(address) == family]

    def _wrong(self, key: str, shown: str, error: DiscoveryError) -> None:
        note = f"{key}: {error.brief}; its last engines stay"
        if self._fleet.notes.get(key) != note:
            log.warning("%s: %s; its last engines stay", shown, error)
            self._fleet.notes[key] = note

    def _well(self, key: str, shown: str) -> None:
        if self._fleet.notes.pop(key, None) is not None:
            log.info("%s is read again", shown)


def at_address(url: str, address: str) -> str:
    """Return the URL of an engine at one address of its name."""
    parts = urlsplit(url)
    host = f"[{address}]" if ":" in address else address
    port = "" if parts.port is None else f":{parts.port}"
    path = parts.path.rstrip("/")
    return f"{parts.scheme}://{host}{port}{path}"


def read_file(path: Path) -> bytes:
    """Return what the file holds.

    Raises:
        DiscoveryError: It cannot be read.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise DiscoveryError("it is not a regular file")
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise DiscoveryError("it is missing") from None
    except OSError as error:
        raise DiscoveryError(f"it cannot be read ({error.strerror})") from None
    if len(content) > MAX_FILE_BYTES:
        raise DiscoveryError(f"it has more than {MAX_FILE_BYTES} bytes")
    return content


def parse_file(content: bytes, tiers: Sequence[TierName]) -> Members:
    """Return the engines that the file names.

    Raises:
        DiscoveryError: It is not JSON in the form {tier: [address, ...]}, or something in it cannot be used.
    """
    try:
        document = json.loads(content)
    except ValueError as error:  # UnicodeDecodeError is a ValueError too.
        raise DiscoveryError("it is not JSON", str(error)) from None
    if not isinstance(document, dict):
        raise DiscoveryError(
            'it is no object such as {"fast": ["http://10.0.0.5:8000"]}'
        )
    tiers_by_name = {str(tier): tier for tier in tiers}
    members = {}
    for name, urls in document.items():
        if name not in tiers_by_name:
            raise DiscoveryError(
                "it names an unknown tier",
                f"{name[:100]!r}; allowed: {', '.join(tiers_by_name)}",
            )
        members[tiers_by_name[name]] = _checked_urls(name, urls)
    _check_once(members)
    return members


def _checked_urls(name: str, urls: object) -> tuple[str, ...]:
    """Return the addresses of a tier's engines.

    Raises:
        DiscoveryError: They are no list of addresses that can be used.
    """
    if not isinstance(urls, list) or not all(isinstance(url, str) for url in urls):
        raise DiscoveryError(f"{name} is no list of addresses")
    for url in urls:
        fault = wrong_with(url)
        if fault:
            raise DiscoveryError(
                f"{name} has an address that cannot be used",
                f"{shown(url)!r}: {fault}",
            )
    return tuple(urls)


def _check_once(members: Members) -> None:
    """Raise ``DiscoveryError`` if an engine is named twice: its load would be counted twice, and it has one precision."""
    seen: set[str] = set()
    for urls in members.values():
        for url in urls:
            if normalised(url) in seen:
                raise DiscoveryError("it names an engine twice", url)
            seen.add(normalised(url))


def shown(url: str) -> str:
    """Return an address that cannot be used for the log: short, and without what may be a password."""
    return url.rpartition("@")[2][:200]
