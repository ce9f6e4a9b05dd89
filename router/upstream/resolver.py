"""The addresses of engines' names. While a name does not resolve, its last addresses stay in use."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(f"qarr.{__name__}")
# a connection to a name whose addresses are known waits no longer for a new lookup
LOOKUP_S = 1.0
# as ``socket.getaddrinfo`` returns it
AddressInfo = tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]


@dataclass(slots=True)
class _Name:
    """What is known of one name.

    Attributes:
        addresses: Result of the last lookup; none: the name was never resolved, or it exists without an address.
        lookup: The lookup that is under way; all who ask meanwhile share it.
        fault: Why the last lookup failed; None: it did not.
        is_stale: Whether the last addresses stay in use because lookups fail or take long.
    """

    addresses: tuple[AddressInfo, ...] = ()
    lookup: asyncio.Task[None] | None = None
    fault: socket.gaierror | None = None
    is_stale: bool = False


async def system_lookup(host: str, port: int) -> Sequence[AddressInfo]:
    """Return the addresses of a name in the order in which to try them; ``socket.gaierror``: it does not resolve."""
    return await asyncio.get_running_loop().getaddrinfo(
        host, port, type=socket.SOCK_STREAM
    )


class Resolver:
    """Looks names up with each connection that is opened. One event loop owns it."""

    def __init__(
        self,
        lookup: Callable[[str, int], Awaitable[Sequence[AddressInfo]]] = system_lookup,
    ) -> None:
        self._lookup = lookup
        self._names: dict[tuple[str, int], _Name] = {}

    async def addresses(self, host: str, port: int) -> tuple[AddressInfo, ...]:
        """Return where connections to a name go; ``socket.gaierror``: no address was ever known, or it has none."""
        name = self._names.setdefault((host, port), _Name())
        if name.lookup is None:
            name.lookup = asyncio.create_task(
                self._look_up(host, port, name), name=f"resolving {host}"
            )
        if name.is_stale and name.addresses:
            return name.addresses
        # By the time that this goes on, another connection may have begun the next one.
        lookup = name.lookup
        limit_s = LOOKUP_S if name.addresses else None
        await asyncio.wait({lookup}, timeout=limit_s)
        if not name.addresses:
            raise name.fault or socket.gaierror(socket.EAI_NONAME, "it has no address")
        has_failed = name.fault is not None or not lookup.done()
        if has_failed and not name.is_stale:
            name.is_stale = True
            why = (
                f"no answer within {LOOKUP_S:g} s"
                if name.fault is None
                else name.fault.strerror
            )
            log.warning(
                "%s does not resolve (%s): its last addresses stay in use", host, why
            )
        return name.addresses

    async def _look_up(self, host: str, port: int, name: _Name) -> None:
        try:
            addresses = await self._lookup(host, port)
        except socket.gaierror as error:
            name.fault = error
            if error.errno == socket.EAI_NODATA:
                name.addresses = ()
        except (
            OSError,
            UnicodeError,
        ) as error:  # UnicodeError: no name at all, such as one with an empty label
            name.fault = socket.gaierror(socket.EAI_NONAME, str(error))
        else:
            name.addresses = tuple(addresses)
            name.fault = None
            if name.is_stale:
                log.info("%s resolves again", host)
            name.is_stale = False
        finally:
            name.lookup = None
