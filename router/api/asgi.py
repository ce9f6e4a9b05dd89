"""What is known of a request apart from its body, and what every endpoint does with its connection."""

from __future__ import annotations

import asyncio
import gzip
import time
import zlib
from collections.abc import Callable, Mapping
from io import BytesIO
from typing import TypeVar, TypeVarTuple

import zstandard
from starlette.types import Message, Receive, Scope

from router.pipeline.request import RequestContext
from router.server.errors import BodyTooLargeError
from router.server.responder import HOLD, OUT, Responder

CONTEXT = "qarr.context"  # in a scope: what ``context_of`` returns
LARGE_BODY = 1 << 16  # bytes
CODINGS = ("gzip", "deflate", "zstd")  # of a request's body
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
T = TypeVar("T")
Args = TypeVarTuple("Args")


class ClientGoneError(Exception):
    """The client closed the connection."""


class UnknownCodingError(Exception):
    """A request body in a coding that is not known here, or not in the one that its head says."""


class ForeignHostError(Exception):
    """A request to a name that is not known to be this router's."""


class ForeignPageError(Exception):
    """A request that a web page of another origin made its reader's browser send."""


def context_of(scope: Scope) -> RequestContext:
    context: RequestContext = scope[CONTEXT]
    return context


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """Read a request's body, up to ``limit`` bytes, these also without its coding; a byte order mark is left out.

    Raises:
        UnknownCodingError: It is coded in a way that is not known here, or not as its head says.
        BodyTooLargeError: It is announced or found to be larger; the rest is left unread.
        ClientGoneError: The client went away before it was complete.
    """
    context: RequestContext = scope[CONTEXT]
    announced = context.sent.get(b"content-length", b"")
    if announced.isdigit() and int(announced) > limit:
        raise BodyTooLargeError(limit)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise BodyTooLargeError(limit)
        parts.append(part)
        if not message.get("more_body", False):
            context.arrived = time.monotonic()
            body = parts[0] if len(parts) == 1 else b"".join(parts)
            if b"content-encoding" in context.sent:
                body = _decoded(body, context.header(b"content-encoding") or "", limit)
            return body.removeprefix(BYTE_ORDER_MARK)


def _decoded(body: bytes, codings: str, limit: int) -> bytes:
    layers = [name.strip().lower().removeprefix("x-") for name in codings.split(",") if name.strip()]
    if layers[2:]:  # a long list would keep everybody waiting
        raise UnknownCodingError(f"a body in {len(layers)} codings cannot be read: encode it once, or twice at most")
    for coding in reversed(layers):
        try:
            if coding == "gzip":
                body = gzip.GzipFile(fileobj=BytesIO(body)).read(limit + 1)
            elif coding == "deflate":
                body = _inflated(body, limit)
            elif coding == "zstd":
                body = _zstd(body, limit)
            elif coding != "identity":
                raise UnknownCodingError(f"Content-Encoding {coding[:40]!r} is not supported: {', '.join(CODINGS)} are")
        except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
            raise UnknownCodingError(f"the body is not {coding}, as its Content-Encoding says: {error}") from None
        if len(body) > limit:
            raise BodyTooLargeError(limit)
    return body


def _inflated(body: bytes, limit: int) -> bytes:
    headed = len(body) > 1 and body[0] & 15 == zlib.DEFLATED and not int.from_bytes(body[:2]) % 31  # RFC 1950
    reader = zlib.decompressobj(zlib.MAX_WBITS if headed else -zlib.MAX_WBITS)  # some send it without zlib's header
    found = reader.decompress(body, limit + 1)
    if not reader.eof and len(found) <= limit:
        raise EOFError("it ends too early")
    return found


def _zstd(body: bytes, limit: int) -> bytes:
    decoder = zstandard.ZstdDecompressor(max_window_size=1 << 23)  # what RFC 8878 asks decoders for, and no more
    found = decoder.stream_reader(body).read(limit + 1)
    if len(found) <= limit:  # read again without a bound: the bounded reader does not tell of its end
        frame = decoder.decompressobj()
        frame.decompress(body)
        if not frame.eof or frame.unused_data:
            raise EOFError("it is not one whole frame")
    return found


async def apart(size: int, work: Callable[[*Args], T], *args: *Args) -> T:
    """Do work on a body of so many bytes: on a large one in a thread, so that it keeps nobody waiting."""
    return await asyncio.to_thread(work, *args) if size > LARGE_BODY else work(*args)


def cancel_on_disconnect(scope: Scope) -> None:
    """Cancel the request's task if its client leaves before it has the whole answer.

    What is left to do after the last byte is always done. ``ClientGoneError``: it has left already.
    """
    out: Responder = scope[OUT]
    if out.cycle.disconnected:
        raise ClientGoneError
    out.cancels = True


def start_message(
    headers: Mapping[str, str], media_type: str, more: Mapping[str, str], *, hold: bool = False
) -> Message:
    """Return the ASGI message that starts an answer of status 200; with ``hold`` it is sent with what follows at once."""
    pairs = [(b"content-type", media_type.encode("latin-1"))]
    for name, value in {**headers, **more}.items():
        pairs.append((name.encode(), value.encode("latin-1", "replace")))
    return {"type": "http.response.start", "status": 200, "headers": pairs, HOLD: hold}


def body_message(data: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}
