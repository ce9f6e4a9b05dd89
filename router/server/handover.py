r"""Hand the listening socket of a running router to another one, so that no connection is refused in between.

A router in front of engines given by URL listens on a Unix socket that only its user may open. A new router connects
there, receives the listening socket (SCM_RIGHTS), gets its own engines ready, and reports it. Both then share one queue of
connections; the old router stops accepting, answers its open requests, and ends. If the new router ends before it is
ready, nothing changes. If several ask, the first one that is ready takes over; the others are told, and end.

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
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from router.aio import end_tasks
from tiers.background import lasting

log = logging.getLogger(f"qarr.{__name__}")
HELLO = b"take over 1\n"
READY = b"ready\n"
LEAVING = b"leaving\n"
TAKEN = b"taken\n"
MAX_PEERS = 16  # New routers that may be connected at once.
ANSWER_S = 10.0  # The old router answers at once, or never.
MAX_LINE_BYTES = 200
_CREDENTIALS = struct.Struct("3i")  # ``ucred`` of <linux/socket.h>: pid, uid, gid.


class TakeoverError(Exception):
    """No router hands over its socket."""


class TakenError(TakeoverError):
    """Another router has taken over first."""


def control_path(folder: Path, port: int | str) -> Path:
    return folder / f"router-{port}.sock"


class HandoverClient:
    """The new router's side: its connection to the old router."""

    def __init__(self, connection: socket.socket, path: Path) -> None:
        self._connection = connection
        self._path = path

    @classmethod
    def ask(cls, path: Path) -> tuple[HandoverClient, socket.socket]:
        """Ask the running router for its listening socket; it keeps serving.

        Raises:
            TakeoverError: There is no such router, or it does not hand over its socket.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(ANSWER_S)
        try:
            connection.connect(str(path))
            connection.sendall(HELLO)
            line, fds, _, _ = socket.recv_fds(connection, MAX_LINE_BYTES, 1)
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
        """Report that this router serves, and wait until the old one accepts no more connections.

        Raises:
            TakenError: Another router has taken over; this one must not serve.
            TakeoverError: The old one does not answer; it may still accept connections.
        """
        try:
            # The old router may have answered already, and ended.
            with contextlib.suppress(BrokenPipeError):
                self._connection.sendall(READY)
            answer = self._connection.recv(MAX_LINE_BYTES)
        except OSError as error:
            raise TakeoverError(
                f"the old router does not answer at {self._path}: end it"
            ) from error
        finally:
            self._connection.close()
        if answer.startswith(TAKEN):
            raise TakenError(
                f"another router has taken over at {self._path} meanwhile: this one exits"
            )
        if answer != LEAVING:
            raise TakeoverError(
                f"the old router did not exit when asked at {self._path}: end it"
            )


@asynccontextmanager
async def handing_over(
    path: Path, listening: socket.socket, version: str, leave: Callable[[], None]
) -> AsyncIterator[None]:
    """Hand over the listening socket to routers that ask, within the context; call ``leave`` when one serves."""
    with _control_socket(path) as control, listening.dup() as shared:
        handover = _Handover(control, shared, version, leave)
        task = asyncio.create_task(
            lasting(handover.accept, "handing over"), name="hand over"
        )
        try:
            yield
        finally:
            await end_tasks([task, *handover.peers])


@contextmanager
def _control_socket(path: Path) -> Iterator[socket.socket]:
    """Listen at a path; when it ends, the path is gone unless another router listens there by then."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    control = _listening_at(path)
    inode = path.stat().st_ino
    try:
        yield control
    finally:
        control.close()
        with contextlib.suppress(OSError):
            # Otherwise the router that took over has put its own there.
            if path.stat().st_ino == inode:
                path.unlink()


def _listening_at(path: Path) -> socket.socket:
    """Return a socket that listens at a path, in place of what was there; only this user may connect to it."""
    control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    own_path = path.with_suffix(f".{os.getpid()}")
    try:
        control.setblocking(False)
        own_path.unlink(missing_ok=True)
        control.bind(str(own_path))
        own_path.chmod(0o600)
        control.listen(MAX_PEERS)
        own_path.replace(path)
    except OSError:
        control.close()
        with contextlib.suppress(OSError):
            own_path.unlink(missing_ok=True)
        raise
    return control


class _Handover:
    """The old router's side. A task answers each new router, so that a silent one delays no other."""

    def __init__(
        self,
        control: socket.socket,
        shared: socket.socket,
        version: str,
        leave: Callable[[], None],
    ) -> None:
        self._control = control
        self._shared = shared
        self._version = version
        self._leave = leave
        self._is_taken_over = False
        # The tasks that answer new routers, with their connections, the oldest first.
        self.peers: dict[asyncio.Task[None], socket.socket] = {}

    async def accept(self) -> None:
        """Answer new routers until cancelled; if too many are connected, end the oldest connection."""
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(self._control)
            if len(self.peers) >= MAX_PEERS:
                next(iter(self.peers)).cancel()
            task = asyncio.create_task(
                self._answer(connection), name="hand over to one"
            )
            self.peers[task] = connection
            task.add_done_callback(self.peers.pop)

    async def _answer(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with connection:
            try:
                if not await self._becomes_ready(connection):
                    return
                if self._is_taken_over:
                    await loop.sock_sendall(connection, TAKEN)
                    return
                self._is_taken_over = True
                self._leave()
                await loop.sock_sendall(connection, LEAVING)
            except OSError as error:
                log.warning(
                    "a router that was to take over went away: %s",
                    str(error) or "it says nothing",
                )
            else:
                self._turn_away_all_but(connection)

    def _turn_away_all_but(self, successor: socket.socket) -> None:
        for connection in self.peers.values():
            if connection is not successor:
                with contextlib.suppress(OSError):
                    connection.send(TAKEN)

    async def _becomes_ready(self, connection: socket.socket) -> bool:
        """Send the listening socket to a new router that may have it; return whether that router then becomes ready."""
        loop = asyncio.get_running_loop()
        connection.setblocking(False)
        if not _may_take_over(connection):
            return False
        async with asyncio.timeout(ANSWER_S):
            if await loop.sock_recv(connection, MAX_LINE_BYTES) != HELLO:
                return False
        if self._is_taken_over:
            return False
        socket.send_fds(
            connection, [f"qarr {self._version}\n".encode()], [self._shared.fileno()]
        )
        # Without a time limit: the new router warms up its engines first, which takes long.
        return await loop.sock_recv(connection, MAX_LINE_BYTES) == READY


def _may_take_over(connection: socket.socket) -> bool:
    """Tell whether the process at the other end runs as the same user, or as root."""
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
    )
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid in {os.getuid(), 0}:
        return True
    log.warning("user %d may not take over this router", uid)
    return False
