"""The router's listening socket, and whether its address may be served."""

from __future__ import annotations

import os
import socket

from router.auth.access import KeyStore, open_access
from router.auth.network import is_loopback
from router.server.connection_limit import allow_files
from router.server.http_protocol import bound_unsent
from router.settings import Settings


class ListenError(Exception):
    """The router's address cannot be listened on."""


def open_keys(settings: Settings, host: str | None = None) -> KeyStore:
    """Return the keys that requests need.

    Args:
        settings: The settings.
        host: The address that is served; None: that of the settings.

    Raises:
        ListenError: There are none, and others than this machine's reach the address.
    """
    if host is None:
        host = settings.server.host
    keys = open_access(settings)
    keys.reached_by_others = not is_loopback(host)
    if keys.required or keys.may_be_keyless:
        return keys
    if keys.version is None:
        fault = "there are no keys: make one with 'qarr keys add NAME'"
    else:
        fault = (
            f"{keys.path} says that requests need no key: need keys with 'qarr keys on'"
        )
    raise ListenError(
        f"server.host is {host}, which others can reach, and {fault}, or say auth.allow_keyless = true to serve "
        f"everyone"
    )


def listen(settings: Settings) -> socket.socket:
    """Open the router's listening socket before anything slow starts.

    Raises:
        ListenError: It cannot be had.
    """
    host = settings.server.host
    port = settings.server.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The address of all interfaces takes connections over IPv4, too.
    takes_ipv4_too = host == "::" and socket.has_dualstack_ipv6()
    try:
        sock = socket.create_server(
            (host, port), family=family, backlog=2048, dualstack_ipv6=takes_ipv4_too
        )
    except OSError as error:
        # ``strerror`` of ``create_server`` repeats the address.
        fault_text = os.strerror(error.errno) if error.errno else str(error)
        raise ListenError(
            f"cannot listen on {host}:{port} ({fault_text}): end what listens there, or choose another port (--port)"
        ) from error
    # Connections inherit it: without it the first token waits 40 ms and more for the acknowledgement of the headers.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    bound_unsent(sock)
    allow_files(settings.server.max_connections)
    sock.set_inheritable(False)
    return sock
