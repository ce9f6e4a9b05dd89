"""What joins a resumed answer to what its caller has: an engine that resumes an answer begins its stream anew.

Its first events tell what the caller has been sent already, perhaps in other pieces. A splicer drops them, cuts the texts
that only begin with what was sent, and gives what follows the ids of the first stream. It compares what it drops: an answer
that begins in another way would be doubled or halved, so it ends with an error.
"""

from __future__ import annotations

from io import StringIO
from typing import Any, NamedTuple, NoReturn, Protocol

import msgspec

from router.upstream.errors import SeamError
from router.upstream.sse import Chunk

_EVENT_DATA = msgspec.json.Decoder(dict[str, Any])


class Sent(NamedTuple):
    """What is known of a stream that was sent, besides what its splicer has noted.

    Attributes:
        first_event: Its first event.
        text: The answer's text that its caller has.
        has_finish_reason: Whether its caller has been told why the answer ended.
    """

    first_event: bytes
    text: str
    has_finish_reason: bool = False


class Splicer(Protocol):
    """Joins the resumed streams of one answer, in one API's events, to what its caller has.

    Attributes:
        can_resume: Whether all that was sent is of a kind that can be compared.
    """

    can_resume: bool

    def note(self, chunk: Chunk) -> None:
        """Note an event that the caller was sent."""

    def begin(self, sent: Sent) -> None:
        """Begin to compare a resumed stream."""

    def splice(self, chunk: Chunk) -> Chunk | None:
        """Return what the caller still lacks of an event of the resumed stream; None: it has all of it.

        ``SeamError``: the stream differs from what the caller has.
        """


class SentText:
    """A text that was sent in pieces, and how much of it a resumed stream has repeated."""

    __slots__ = ("_compared", "_known", "_sent")

    def __init__(self, text: str = "") -> None:
        self._sent = StringIO()
        self._sent.write(text)
        self._known = text  # what was sent before the resumed stream began
        self._compared = 0  # so much of it has been repeated

    def __str__(self) -> str:
        return self._sent.getvalue()

    def append(self, text: str) -> None:
        self._sent.write(text)

    def begin(self) -> None:
        """Begin to compare a resumed stream."""
        self._known = self._sent.getvalue()
        self._compared = 0

    def rest_of(self, text: str) -> str:
        """Return what of a resumed stream's next piece was not sent; ``SeamError``: it differs from what was."""
        known = self._known
        start = self._compared
        if start == len(known):
            return text
        end = min(start + len(text), len(known))
        repeated = end - start
        if known[start:end] != text[:repeated]:
            differs()
        self._compared = end
        return text[repeated:]

    @property
    def is_repeated(self) -> bool:
        """Tell whether the resumed stream has repeated all that was sent."""
        return self._compared == len(self._known)


def differs() -> NoReturn:
    """Raise the error for a resumed stream that differs from what was sent; it quotes nothing of the answer."""
    raise SeamError("the engine that resumed the answer began it differently")


def data_of(event: bytes) -> dict[str, Any]:
    """Return an event's data."""
    try:
        return _EVENT_DATA.decode(event.partition(b"data:")[2])
    except msgspec.DecodeError:
        differs()
