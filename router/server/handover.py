r"""Hand the listening socket of a running router to another one, so that no connection is refused in between.

A router in front of engines given by URL listens on a Unix socket that only its user may open. Another router connects
there, is given the listening socket (SCM_RIGHTS), gets its own engines ready, and says so. From then on both share one
queue of connections; the old router stops taking from it, answers what it has, and leaves. If the new one ends before it
says so, nothing has happened. Of several that ask, the first one that is ready takes over; the others are told and
leave.

    new → "take over 1\n"     old → "qarr VERSION\n" with the socket
    new → "ready\n"           old → "leaving\n", or "taken\n" where another router was first
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from router.aio import end_tasks
from tiers.background import lasting

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

log = logging.getLogger(f"qarr.{__name__}")
HELLO, READY, LEAVING, TAKEN = b"take over 1\n", b"ready\n", b"leaving\n", b"taken\n"
MOST_PEERS = 16  # routers that may ask at once
ANSWER_S = 10.0  # the old router answers at once, or never
LONGEST_LINE = 200
_CREDENTIALS = struct.Struct("3i")  # <linux/socket.h> ucred: pid, uid, gid


class TakeoverError(Exception):
    """There is nothing to take over, or it was not handed over."""


class TakenError(TakeoverError):
    """Another router has taken over meanwhile."""


def control_path(folder: Path, port: int) -> Path:
    """Return where the router on a port listens for another one that takes over."""
    return folder / f"router-{port}.sock"


class HandoverClient:
    """The new router's side: the connection to the router that it takes over from."""

    def __init__(self, connection: socket.socket, path: Path) -> None:
        self._connection, self._path = connection, path

    @classmethod
    def ask(cls, path: Path) -> tuple[HandoverClient, socket.socket]:
        """Ask the running router for its listening socket; it goes on serving.

        Raises:
            TakeoverError: Nobody is there, or it does not hand over.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(ANSWER_S)
        try:
            connection.connect(str(path))
            connection.sendall(HELLO)
            line, fds, _, _ = socket.recv_fds(connection, LONGEST_LINE, 1)
        except OSError as error:
            connection.close()
            raise TakeoverError(
                f"there is no router to take over from at {path} ({error.strerror or 'it does not answer'}): start one "
                f"without --takeover. A 'qarr up' cannot be taken over, its engines end with it"
            ) from error
        if not line.startswith(b"qarr ") or not fds:
            connection.close()
            raise TakeoverError(
                f"the router at {path} did not hand over its socket: end it, and start without --takeover"
            )
        return cls(connection, path), socket.socket(fileno=fds[0])

    def ready(self) -> None:
        """Say that this router serves, and wait until the old one takes no more connections.

        Raises:
            TakenError: Another router has taken over, so this one is not to serve.
            TakeoverError: The old one does not answer; it may still take connections.
        """
        try:
            with contextlib.suppress(BrokenPipeError):  # it may have told already, and gone
                self._connection.sendall(READY)
            answer = self._connection.recv(LONGEST_LINE)
        except OSError as error:
            raise TakeoverError(f"the old router does not answer at {self._path}: end it") from error
        finally:
            self._connection.close()
        if answer.startswith(TAKEN):
            raise TakenError(f"another router has taken over at {self._path} meanwhile: this one leaves")
        if answer != LEAVING:
            raise TakeoverError(f"the old router did not leave when asked at {self._path}: end it")


@asynccontextmanager
async def handing_over(
    path: Path, listening: socket.socket, version: str, leave: Callable[[], None]
) -> AsyncIterator[None]:
    """Hand over the listening socket to whoever asks, for as long as the context lasts.

    Args:
        path: Of the control socket; one that is there already is replaced.
        listening: The router's.
        version: Of this router, for the one that asks.
        leave: Called when another router serves.
    """
    door, ours = _bound(path)
    shared = listening.dup()
    handover = _Handover(door, shared, version, leave)
    task = asyncio.create_task(lasting(handover.accept, "handing over"), name="hand over")
    try:
        yield
    finally:
        await end_tasks([task, *handover.peers])
        door.close()
        shared.close()
        _unlink(path, ours)


def _bound(path: Path) -> tuple[socket.socket, int]:
    """Return a listening control socket that nobody else may open, and its inode."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    part = path.with_suffix(f".{os.getpid()}")
    part.unlink(missing_ok=True)
    door.bind(str(part))
    part.chmod(0o600)
    door.listen(MOST_PEERS)
    part.replace(path)
    return door, path.stat().st_ino


def _unlink(path: Path, ours: int) -> None:
    """Remove a control socket, unless it is that of the router that took over."""
    with contextlib.suppress(OSError):
        if path.stat().st_ino == ours:
            path.unlink()


class _Handover:
    """The old router's side. Each router that asks is answered by itself: one that says nothing keeps no other waiting.

    Attributes:
        peers: The tasks that answer, with their connections, the oldest first.
    """

    def __init__(self, door: socket.socket, shared: socket.socket, version: str, leave: Callable[[], None]) -> None:
        self._door, self._shared, self._version, self._leave = door, shared, version, leave
        self._taken = False
        self.peers: dict[asyncio.Task[None], socket.socket] = {}

    async def accept(self) -> None:
        """Answer whoever connects, until cancelled; of too many at once the oldest is given up."""
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(self._door)
            if len(self.peers) >= MOST_PEERS:
                next(iter(self.peers)).cancel()
            task = asyncio.create_task(self._answer(connection), name="hand over to one")
            self.peers[task] = connection
            task.add_done_callback(self.peers.pop)

    async def _answer(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with connection:
            try:
                if not await self._handed(connection):
                    return
                if self._taken:
                    await loop.sock_sendall(connection, TAKEN)
                    return
                self._taken = True
                self._leave()
                await loop.sock_sendall(connection, LEAVING)
            except OSError as error:
                log.warning("a router that was to take over went away: %s", str(error) or "it says nothing")
            else:
                self._tell_others(connection)

    async def _handed(self, connection: socket.socket) -> bool:
        """Hand over the socket; tell whether the other router serves now."""
        loop = asyncio.get_running_loop()
        connection.setblocking(False)
        _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if uid not in {os.getuid(), 0}:
            log.warning("user %d may not take over this router", uid)
            return False
        async with asyncio.timeout(ANSWER_S):
            if await loop.sock_recv(connection, LONGEST_LINE) != HELLO:
                return False
        if self._taken:
            return False
        socket.send_fds(connection, [f"qarr {self._version}\n".encode()], [self._shared.fileno()])
        return await loop.sock_recv(connection, LONGEST_LINE) == READY  # it warms its engines first; or it ends

    def _tell_others(self, heir: socket.socket) -> None:
        """Tell those who have the socket but do not serve yet that another router has taken over."""
        for connection in self.peers.values():
            if connection is not heir:
                with contextlib.suppress(OSError):
                    connection.send(TAKEN)
