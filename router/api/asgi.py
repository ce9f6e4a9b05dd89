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
from router.server.errors import BodyTooLargeError, TextTooLargeError
from router.server.large_bodies import LARGE_BODY_BYTES, HeldBody
from router.server.responder import HOLD, OUT, Responder
from router.upstream.long_data import cut

CONTEXT = "qarr.context"  # in a scope: what ``context_of`` returns
HELD = "qarr.held_body"  # in a scope: what counts the body's bytes
CODINGS = ("gzip", "deflate", "zstd")  # that a request's body may have
MAX_CODINGS = 2  # undoing a long list would keep other requests waiting
# what RFC 8878 recommends that decoders support, and no more
ZSTD_WINDOW_BYTES = 1 << 23
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
T = TypeVar("T")
Args = TypeVarTuple("Args")


class ClientGoneError(Exception):
    """The client closed the connection."""


class UnknownCodingError(Exception):
    """A request body has a coding that is not known here, or not the one that its head names."""


class ForeignHostError(Exception):
    """A request names a host that is not known to be this router."""


class ForeignPageError(Exception):
    """A web page of another origin made its reader's browser send a request."""


def context_of(scope: Scope) -> RequestContext:
    context: RequestContext = scope[CONTEXT]
    return context


async def read_body(
    scope: Scope, receive: Receive, limit: int, *, text_limit: int | None = None
) -> bytes:
    """Read a request's body without its coding and byte order mark: at most ``limit`` bytes, coded and decoded.

    ``text_limit``: most bytes of it besides images and other long data; None: as many as there may be.

    Raises:
        UnknownCodingError: The body has a coding that is not known here, or not the one that its head names.
        TooManyBodiesError: All bodies together are too large.
        BodyTooLargeError: The body is announced or turns out to be larger; what remains is not read.
        TextTooLargeError: Its text is.
        ClientGoneError: The client went away before the body was complete.
    """
    context: RequestContext = scope[CONTEXT]
    announced = context.request_headers.get(b"content-length", b"")
    if announced.isdigit() and int(announced) > limit:
        raise BodyTooLargeError(limit)
    held: HeldBody | None = scope.get(HELD)
    parts: list[bytes] = []
    size = 0
    more_body = True
    while more_body:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise BodyTooLargeError(limit)
        if held is not None:
            held.grow_to(size)
        parts.append(part)
        more_body = message.get("more_body", False)
    context.arrived_at = time.monotonic()
    body = parts[0] if len(parts) == 1 else b"".join(parts)
    if b"content-encoding" in context.request_headers:
        body = _decode(body, context.header(b"content-encoding") or "", limit)
        if held is not None:
            held.grow_to(len(body))
    if text_limit is not None and len(body) > text_limit:
        shorter = await apart(len(body), cut, body)
        if len(shorter.text) > text_limit:
            raise TextTooLargeError(text_limit)
    return body.removeprefix(BYTE_ORDER_MARK)


def _decode(body: bytes, content_encoding: str, limit: int) -> bytes:
    """Undo a body's codings, the last one first."""
    codings = [
        name.strip().lower().removeprefix("x-")
        for name in content_encoding.split(",")
        if name.strip()
    ]
    if len(codings) > MAX_CODINGS:
        raise UnknownCodingError(
            f"a body in {len(codings)} codings cannot be read: encode it once, or twice at most"
        )
    for coding in reversed(codings):
        try:
            body = _decode_once(body, coding, limit)
        except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
            raise UnknownCodingError(
                f"the body is not {coding}, as its Content-Encoding says: {error}"
            ) from None
        if len(body) > limit:
            raise BodyTooLargeError(limit)
    return body


def _decode_once(body: bytes, coding: str, limit: int) -> bytes:
    """Undo one coding, up to one byte over ``limit``, so that a small body cannot fill the memory."""
    if coding == "gzip":
        return gzip.GzipFile(fileobj=BytesIO(body)).read(limit + 1)
    if coding == "deflate":
        return _inflate(body, limit)
    if coding == "zstd":
        return _decode_zstd(body, limit)
    if coding == "identity":
        return body
    raise UnknownCodingError(
        f"Content-Encoding {coding[:40]!r} is not supported: {', '.join(CODINGS)} are"
    )


def _inflate(body: bytes, limit: int) -> bytes:
    """Undo ``deflate``, with zlib's header, as the standard says, or without it, as some clients send it."""
    window_bits = zlib.MAX_WBITS
    if not _has_zlib_header(body):
        window_bits = -zlib.MAX_WBITS  # how zlib is told that there is no header
    decompressor = zlib.decompressobj(window_bits)
    content = decompressor.decompress(body, limit + 1)
    if not decompressor.eof and len(content) <= limit:
        raise EOFError("it ends too early")
    return content


def _has_zlib_header(body: bytes) -> bool:
    """Tell whether a body begins with a method and a check as in RFC 1950."""
    if len(body) < 2:  # noqa: PLR2004
        return False
    method = body[0] & 15
    is_check_right = int.from_bytes(body[:2]) % 31 == 0
    return method == zlib.DEFLATED and is_check_right


def _decode_zstd(body: bytes, limit: int) -> bytes:
    decompressor = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES)
    content = decompressor.stream_reader(body).read(limit + 1)
    # read it again without a bound, since the bounded reader does not tell of its end
    if len(content) <= limit:
        frame = decompressor.decompressobj()
        frame.decompress(body)
        if not frame.eof or frame.unused_data:
            raise EOFError("it is not one whole frame")
    return content


async def apart(size: int, work: Callable[[*Args], T], *args: *Args) -> T:
    """Do work on a body of so many bytes: on a large one in a thread, so that other requests need not wait for it."""
    if size > LARGE_BODY_BYTES:
        return await asyncio.to_thread(work, *args)
    return work(*args)


def cancel_on_disconnect(scope: Scope) -> None:
    """Cancel the request's task if its client leaves before it has the whole answer.

    What remains to be done after the last byte is always done. ``ClientGoneError``: the client has left already.
    """
    out: Responder = scope[OUT]
    if out.cycle.disconnected:
        raise ClientGoneError
    out.cancels = True


def start_message(
    headers: Mapping[str, str],
    media_type: str,
    more: Mapping[str, str],
    *,
    hold: bool = False,
) -> Message:
    """Return the ASGI message that starts an answer of status 200; with ``hold`` it waits to be sent with what follows."""
    pairs = [(b"content-type", media_type.encode("latin-1"))]
    for name, value in {**headers, **more}.items():
        pairs.append((name.encode(), value.encode("latin-1", "replace")))
    return {"type": "http.response.start", "status": 200, "headers": pairs, HOLD: hold}


def body_message(data: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}
