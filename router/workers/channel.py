"""Messages between the first process and a worker, over a pair of sockets that only they have.

Each message is a pickled tuple after its length. Both are the same release, and one has started the other, so whatever
either sends may be unpickled. ``tell`` sends and goes on; ``ask`` waits for the answer, or for the error there.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import pickle
import struct
from typing import TYPE_CHECKING, Any

from tiers.background import Faults

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

log = logging.getLogger(f"qarr.{__name__}")
_LENGTH = struct.Struct("<Q")
ASK, TELL, ANSWER, ERROR = range(4)


class ChannelClosed(ConnectionError):
    """The other process has ended."""


class Channel:
    """One end. ``run`` it until the other process ends.

    Args:
        sock: This end's socket.
        handlers: What the other process may tell or ask, by name; of an ask, the result is the answer.

    Attributes:
        closed: Set when the other process has ended.
    """

    def __init__(self, sock: socket.socket, handlers: dict[str, Callable[..., Any]]) -> None:
        self._sock, self._handlers = sock, handlers
        self._writer: asyncio.StreamWriter | None = None
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._faults = Faults()
        self.closed = asyncio.Event()

    async def run(self) -> None:
        """Take messages until the other process ends."""
        try:
            reader, self._writer = await asyncio.open_connection(sock=self._sock)
            while True:
                (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                self._take(*pickle.loads(await reader.readexactly(size)))  # noqa: S301  this program's own
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self.closed.set()
            for answer in self._asked.values():
                if not answer.done():
                    answer.set_exception(ChannelClosed("the other process has ended"))
            for task in self._tasks:
                task.cancel()
            if self._writer is not None:
                self._writer.close()

    def tell(self, name: str, *args: Any) -> None:
        """Send a message that has no answer; nothing happens once the other process has ended."""
        self._send((TELL, 0, name, args))

    async def ask(self, name: str, *args: Any) -> Any:
        """Send a message, and return its answer.

        Raises:
            ChannelClosed: The other process has ended.
            Exception: What the other process raised.
        """
        if self.closed.is_set():
            raise ChannelClosed("the other process has ended")
        self._number += 1
        number = self._number
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self._send((ASK, number, name, args))
            return await answer
        finally:
            del self._asked[number]

    def _send(self, message: tuple[Any, ...]) -> None:
        if self._writer is not None and not self.closed.is_set():
            data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
            self._writer.write(_LENGTH.pack(len(data)) + data)

    def _take(self, kind: int, number: int, name: str, content: Any) -> None:
        if kind in {ANSWER, ERROR}:
            asked = self._asked.get(number)
            if asked is not None and not asked.done():
                if kind == ANSWER:
                    asked.set_result(content)
                else:
                    asked.set_exception(content)
            return
        task = asyncio.create_task(self._handle(kind, number, name, content), name=f"handling {name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _handle(self, kind: int, number: int, name: str, args: tuple[Any, ...]) -> None:
        try:
            result = self._handlers[name](*args)
            if inspect.isawaitable(result):
                result = await result
        except Exception as error:  # noqa: BLE001  it is the other process' as well
            if kind == TELL:
                self._faults.log(error, f"{name} from another process failed")
            else:
                self._answer(ERROR, number, error)
        else:
            if kind == ASK:
                self._answer(ANSWER, number, result)

    def _answer(self, kind: int, number: int, content: Any) -> None:
        try:
            self._send((kind, number, "", content))
        except Exception as error:  # noqa: BLE001  whatever cannot be pickled
            self._faults.log(error, "an answer could not be sent to another process")
            self._send((ERROR, number, "", RuntimeError(f"{type(error).__name__}: {error}")))
