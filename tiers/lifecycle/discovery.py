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
MOST_BYTES = 1 << 20  # of the file
CONNECT_S = 2.0
NEXT_ADDRESS_S = 0.25  # as RFC 8305, section 5, recommends
Family = socket.AddressFamily


async def resolve(host: str, port: int) -> list[str]:
    """Return all IPv4 and IPv6 addresses of a name; none: the name has no address.

    Raises:
        OSError: The name server does not know the name, or does not answer.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno == socket.EAI_NODATA:
            return []
        raise
    return list(dict.fromkeys(str(address[0]) for *_, address in found if "%" not in str(address[0])))


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
    infos = [(family_of(address), socket.SOCK_STREAM, 0, "", (address, port)) for address in addresses]
    try:
        async with asyncio.timeout(CONNECT_S):
            connection = await start_connection(infos, happy_eyeballs_delay=NEXT_ADDRESS_S, interleave=1)
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
        self._fleet, self._roster, self._options = fleet, roster, options
        self._read: bytes | None = None  # the file, as last looked at
        self._families: dict[TierName, Family] = {}  # that the engines of names with addresses of both are reached in

    def works(self) -> list[tuple[Callable[[], Coroutine[Any, Any, None]], str]]:
        """Return what runs until cancelled, with its names. Until the first look, tiers that may be named are awaited."""
        found: list[tuple[Callable[[], Coroutine[Any, Any, None]], str]] = []
        if self._options.file is not None:
            self._roster.name(Source.FILE, dict.fromkeys(self._roster.tiers, ()))
            found.append((partial(self._follow_file, self._options.file), f"reading {FILE}"))
        for tier, url in self._options.names.items():
            self._roster.name(Source.DNS, {tier: ()}, tier)
            found.append((partial(self._follow_name, tier, url), f"resolving tiers.{tier}.dns"))
        return found

    async def _follow_file(self, path: Path) -> None:
        while True:
            try:
                read = await asyncio.to_thread(read_file, path)
                if read != self._read:
                    self._roster.name(Source.FILE, parse_file(read, self._roster.tiers))
                    self._read = read
                self._well(FILE, f"{FILE} {path}")
            except DiscoveryError as error:
                self._read = None
                self._wrong(FILE, f"{FILE} {path}", error)
            await asyncio.sleep(self._options.interval_s)

    async def _follow_name(self, tier: TierName, url: str) -> None:
        key, parts = f"tiers.{tier}.dns", urlsplit(url)
        while True:
            try:
                port = parts.port or 80
                addresses = await self._options.resolve(parts.hostname or "", port)
                addresses = await self._of_one_family(tier, url, addresses, port)
                self._roster.name(Source.DNS, {tier: tuple(at_address(url, each) for each in addresses)}, tier)
                self._well(key, f"{key} {url}")
            except (OSError, UnicodeError) as error:
                self._wrong(key, f"{key} {url}", DiscoveryError("it does not resolve", str(error)))
            await asyncio.sleep(self._options.interval_s)

    async def _of_one_family(self, tier: TierName, url: str, addresses: list[str], port: int) -> list[str]:
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
                    "tiers.%s.dns %s has IPv4 and IPv6 addresses: its %s addresses are the engines", tier, url, kind
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
    port = "" if parts.port is None else f":{parts.port}"
    return f"{parts.scheme}://{f'[{address}]' if ':' in address else address}{port}{parts.path.rstrip('/')}"


def read_file(path: Path) -> bytes:
    """Return what the file holds.

    Raises:
        DiscoveryError: It cannot be read.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise DiscoveryError("it is not a regular file")
        with path.open("rb") as file:
            read = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise DiscoveryError("it is missing") from None
    except OSError as error:
        raise DiscoveryError(f"it cannot be read ({error.strerror})") from None
    if len(read) > MOST_BYTES:
        raise DiscoveryError(f"it has more than {MOST_BYTES} bytes")
    return read


def parse_file(read: bytes, tiers: Sequence[TierName]) -> Members:
    """Return the engines that the file names.

    Raises:
        DiscoveryError: It is not JSON in the form {tier: [address, ...]}, or something in it cannot be used.
    """
    try:
        named = json.loads(read)
    except ValueError as error:  # UnicodeDecodeError is one
        raise DiscoveryError("it is not JSON", str(error)) from None
    if not isinstance(named, dict):
        raise DiscoveryError('it is no object such as {"fast": ["http://10.0.0.5:8000"]}')
    known, found = {str(tier): tier for tier in tiers}, {}
    for name, urls in named.items():
        if name not in known:
            raise DiscoveryError("it names an unknown tier", f"{name[:100]!r}; allowed: {', '.join(known)}")
        if not isinstance(urls, list) or not all(isinstance(url, str) for url in urls):
            raise DiscoveryError(f"{name} is no list of addresses")
        for url in urls:
            if wrong := wrong_with(url):
                raise DiscoveryError(f"{name} has an address that cannot be used", f"{shown(url)!r}: {wrong}")
        found[known[name]] = tuple(urls)
    _check_once(found)
    return found


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
