"""Clients that send too much or too slowly, or do not read their answers, hold nothing for long: over real sockets."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from contextlib import AsyncExitStack
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from router.auth.api_keys import add_key
from tests.unit.router_stack import events, router_stack
from tests.unit.server.raw_connections import (
    answer_of,
    connected,
    open_at,
    port_of,
    request,
)
from tests.waiting import until, until_still
from tiers.spec import TierName

pytestmark = pytest.mark.anyio
SHORT = {"header_timeout_s": 0.3, "body_timeout_s": 0.3, "write_timeout_s": 0.5}
PIECE = "x" * 100_000


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
async def test_a_client_that_stops_reading_holds_the_engine_back_and_is_cut(
    tmp_path: Path, path: str
) -> None:
    """Only as much is read from its engine as bounded buffers take; then the request is aborted and its lease given back."""
    async with router_stack(tmp_path, {"server": {"write_timeout_s": 3}}) as stack:
        engine = stack.engines[TierName.FAST]
        engine.answer = (PIECE,) * 1000
        body = {"prompt": "hi", "tier": "fast", "max_tokens": 1000}
        chat = {
            "messages": [{"role": "user", "content": "hi"}],
            "model": "fast",
            "stream": True,
            "max_tokens": 1000,
        }
        async with connected(stack, small=True) as (reader, writer):
            writer.write(request(path, body if path == "/generate" else chat))
            await reader.readuntil(b"data: ")
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            await until_still(
                lambda: engine.tokens, "the engine to be held back", still_s=1
            )
            assert stack.leases() > 0
            # The buffers of four sockets, and our own, take some of the 1000.
            assert 0 < engine.tokens < 400
            await until(lambda: engine.running == 0 and stack.leases() == 0)
            assert engine.tokens < 400
            await until(lambda: not open_at(port_of(stack)))
        assert (await stack.generate(tier="balanced")).status_code == 200


async def test_a_finished_answer_that_is_not_read_is_cut(tmp_path: Path) -> None:
    """A complete answer that nobody reads does not keep its connection open for ever."""
    async with router_stack(tmp_path, {"server": SHORT}) as stack:
        stack.engines[TierName.FAST].answer = (PIECE,) * 300
        async with connected(stack, small=True) as (_, writer):
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            body = {"prompt": "hi", "tier": "fast", "max_tokens": 300, "stream": False}
            writer.write(request("/generate", body, "connection: close"))
            await until(lambda: open_at(port_of(stack)) == 1)
            await until(lambda: not open_at(port_of(stack)))
        assert stack.leases() == 0


async def test_answers_that_nobody_takes_are_bounded_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four answers of 24 MB two may wait: the kernel takes some of each, and the router 50 MB in all."""
    monkeypatch.setattr("router.server.http_protocol.MAX_UNREAD_BYTES", 50_000_000)
    async with router_stack(tmp_path) as stack, AsyncExitStack() as clients:
        stack.engines[TierName.FAST].answer = (PIECE,) * 240
        body = {"prompt": "hi", "tier": "fast", "max_tokens": 240, "stream": False}
        port = port_of(stack)
        for number in range(4):
            _, writer = await clients.enter_async_context(connected(stack, small=True))
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(request("/generate", body))
            connections = min(number + 1, 2)

            def has_only(connections: int = connections) -> bool:
                return open_at(port) == connections and not stack.leases()

            await until(has_only)
        assert (await stack.generate(tier="balanced")).status_code == 200


async def test_a_head_that_comes_too_slowly_is_408(tmp_path: Path) -> None:
    """A head that is not completed is answered with a problem, and the connection ends."""
    async with router_stack(tmp_path, {"server": SHORT}) as stack:
        for sent in (b"POST /generate HTTP/1.1\r\nhost:", b"\r\n", b"GET /healthz HTT"):
            async with connected(stack) as (reader, writer):
                writer.write(sent)
                status, headers, body = await answer_of(reader)
            assert status == 408, sent
            assert headers["connection"] == "close", sent
            assert headers["content-type"] == "application/problem+json", sent
            problem = json.loads(body)
            assert problem["status"] == 408
            assert problem["type"] == "urn:qarr:problem:too-slow"
            assert problem["request_id"] == headers["x-request-id"]


async def test_trickled_headers_do_not_extend_their_time(tmp_path: Path) -> None:
    """Headers that arrive one by one must be complete within the same time."""
    async with (
        router_stack(tmp_path, {"server": SHORT}) as stack,
        connected(stack) as (reader, writer),
    ):
        writer.write(b"GET /healthz HTTP/1.1\r\n")
        reading = asyncio.create_task(answer_of(reader))
        for number in range(100):
            writer.write(b"x-%d: y\r\n" % number)
            await asyncio.sleep(0.05)
            if reading.done():
                break
        assert (await reading)[0] == 408


async def test_a_silent_connection_is_closed(tmp_path: Path) -> None:
    """A connection that sends nothing is closed without an answer; blank lines between two requests do not keep it open."""
    async with router_stack(tmp_path, {"server": SHORT}) as stack:
        async with connected(stack) as (reader, writer):
            assert await asyncio.wait_for(reader.read(), 10) == b""
        async with connected(stack) as (reader, writer):
            writer.write(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert await asyncio.wait_for(reader.readuntil(b"alive"), 10)
            reading = asyncio.create_task(reader.read())

            def sends_blank_lines_until_closed() -> bool:
                writer.write(b"\r\n")
                return reading.done()

            await until(sends_blank_lines_until_closed, poll_s=0.05)
            assert b" 408 " in await reading
        await until(lambda: not open_at(port_of(stack)))


@pytest.mark.parametrize(
    ("path", "name"), [("/generate", "type"), ("/v1/chat/completions", "error")]
)
async def test_a_body_that_comes_too_slowly_is_408(
    tmp_path: Path, path: str, name: str
) -> None:
    """A body that is not completed is answered in the endpoint's own form, and the connection ends."""
    async with (
        router_stack(tmp_path, {"server": SHORT}) as stack,
        connected(stack) as (reader, writer),
    ):
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 50\r\n\r\n"
        writer.write(head.encode() + b'{"prompt"')
        status, headers, body = await answer_of(reader)
        assert status == 408
        assert headers["connection"] == "close"
        assert name in json.loads(body)
        assert stack.leases() == 0


async def test_a_body_that_nobody_reads_ends_with_its_time(tmp_path: Path) -> None:
    """An endpoint that needs no body answers at once; a body that goes on after that keeps nothing open."""
    async with (
        router_stack(tmp_path, {"server": SHORT}) as stack,
        connected(stack) as (reader, writer),
    ):
        writer.write(
            b"GET /healthz HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\nx"
        )
        reading = asyncio.create_task(answer_of(reader))

        def sends_more_until_answered() -> bool:
            writer.write(b"x")
            return reading.done()

        await until(sends_more_until_answered, poll_s=0.05)
        status, _, body = await reading
        assert status == 200
        assert body == b'{"status":"alive"}'


LARGE_HEADS = [
    b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"GET / HTTP/1.1\r\nx: " + b"a" * 40_000 + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\nx: " + b"a" * 40_000,
    b"GET / HTTP/1.1\r\n"
    + b"".join(b"x-%d: y\r\n" % number for number in range(101))
    + b"\r\n",
]


async def test_a_head_that_is_too_large_is_431(tmp_path: Path) -> None:
    """Path and headers are bounded in bytes and in number, also in a head that is not complete."""
    async with router_stack(tmp_path) as stack:
        for head in LARGE_HEADS:
            async with connected(stack) as (reader, writer):
                for start in range(0, len(head), 10_000):
                    writer.write(head[start : start + 10_000])
                    await asyncio.sleep(0)
                status, headers, body = await answer_of(reader)
            assert status == 431, head[:30]
            assert headers["connection"] == "close", head[:30]
            assert json.loads(body)["type"] == "urn:qarr:problem:head-too-large"


async def test_a_large_head_and_a_large_body_in_one_piece_are_served(
    tmp_path: Path,
) -> None:
    """The bound on a head does not count what follows it."""
    async with router_stack(tmp_path) as stack:
        body = {"prompt": "a" * 16_000, "tier": "precise", "stream": False}
        answer = await stack.client.post(
            f"{stack.url}/generate", json=body, headers={"x-long": "y" * 30_000}
        )
        assert answer.status_code == 200


async def test_too_many_connections_are_503(tmp_path: Path) -> None:
    """A connection beyond the bound is told when to try again; those that were open before are served."""
    async with router_stack(tmp_path, {"server": {"max_connections": 2}}) as stack:
        async with connected(stack) as (first_reader, first_writer), connected(stack):
            await until(lambda: open_at(port_of(stack)) == 2)
            async with connected(stack) as (reader, writer):
                writer.write(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
                status, headers, body = await answer_of(reader)
                assert status == 503
                assert headers["retry-after"] == "1"
                assert headers["connection"] == "close"
                assert (
                    json.loads(body)["type"] == "urn:qarr:problem:too-many-connections"
                )
            first_writer.write(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert b" 200 " in await first_reader.readuntil(b"alive")
        await until(lambda: not open_at(port_of(stack)))
        assert (await stack.generate()).status_code == 200


NO_REQUESTS = [
    b"nonsense\r\n\r\n",
    b"GET /a b HTTP/1.1\r\n\r\n",
    b"GET /\xff HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"CONNECT x:1 HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"POST /route HTTP/1.1\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
    b"POST /route HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /route HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n\r\n",
    b"GET / HTTP/1.1\r\nx: a\x00b\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
]


async def test_what_is_no_request_is_a_400_problem(tmp_path: Path) -> None:
    """Bytes that are not HTTP, or could be read in two ways, are refused in the form of every other error."""
    async with router_stack(tmp_path) as stack:
        for sent in NO_REQUESTS:
            async with connected(stack) as (reader, writer):
                writer.write(sent)
                status, headers, body = await answer_of(reader)
            assert status == 400, sent
            assert headers["connection"] == "close", sent
            assert json.loads(body)["status"] == 400


HOSTS = [
    (b"GET /tiers HTTP/1.1\r\n\r\n", 400),
    (b"GET /tiers HTTP/1.1\r\nhost: 127.0.0.1\r\nhost: evil.example\r\n\r\n", 400),
    (b"GET /tiers HTTP/1.1\r\nhost: 127.0.0.1\r\nHost: 127.0.0.1\r\n\r\n", 400),
    (b"GET /tiers HTTP/1.0\r\nhost: 127.0.0.1\r\nhost: 127.0.0.1\r\n\r\n", 400),
    (
        b"GET http://evil.example/tiers HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n",
        421,
    ),
    (
        b"GET http://127.0.0.1/tiers HTTP/1.1\r\nhost: evil.example\r\nconnection: close\r\n\r\n",
        200,
    ),
    (b"GET /tiers HTTP/1.0\r\n\r\n", 200),
]


async def test_it_is_clear_which_host_is_meant(tmp_path: Path) -> None:
    """HTTP/1.1 needs exactly one Host header; a path that names a host takes precedence (RFC 9112, 3.2)."""
    async with router_stack(tmp_path) as stack:
        for sent, status in HOSTS:
            async with connected(stack) as (reader, writer):
                writer.write(sent)
                assert (await answer_of(reader))[0] == status, sent


@pytest.mark.parametrize("keep", [b"", b"connection: keep-alive\r\n"])
async def test_http_1_0_gets_no_chunks(tmp_path: Path, keep: bytes) -> None:
    """A client of HTTP/1.0 gets a stream without chunks, which ends with the connection; other answers have a length."""
    async with router_stack(tmp_path) as stack:
        for streamed in (True, False):
            body = json.dumps({"prompt": "hi", "stream": streamed}).encode()
            async with connected(stack) as (reader, writer):
                writer.write(b"POST /generate HTTP/1.0\r\n" + keep)
                writer.write(b"content-length: %d\r\n\r\n" % len(body) + body)
                status, headers, answer = await answer_of(reader)
            assert status == 200
            assert headers["connection"] == "close"
            assert "transfer-encoding" not in headers
            if streamed:
                assert "content-length" not in headers
                assert events(answer.decode())[-1][0] == "done"
            else:
                assert headers["content-length"] == str(len(answer))
                assert json.loads(answer)["finish_reason"] == "stop"
        async with connected(stack) as (reader, writer):
            writer.write(b"HEAD /tiers HTTP/1.0\r\n\r\n")
            status, _, answer = await answer_of(reader)
        assert status == 200
        assert answer == b""


async def test_garbage_after_a_request_does_not_get_into_its_answer(
    tmp_path: Path,
) -> None:
    """Garbage after a streamed request ends the connection: no error is written into the stream."""
    async with router_stack(tmp_path) as stack, connected(stack) as (reader, writer):
        engine = stack.engines[TierName.FAST]
        engine.answer = ("word ",) * 200
        engine.delay_s = 0.05
        writer.write(request("/generate", {"prompt": "hi", "tier": "fast"}))
        begun = await reader.readuntil(b"data: ")
        writer.write(b"garbage\r\n\r\n")
        remainder = await asyncio.wait_for(reader.read(), 10)
        assert (begun + remainder).count(b"HTTP/1.1") == 1
        await until(lambda: engine.running == 0 and stack.leases() == 0)


async def test_a_client_that_leaves_with_requests_in_line_frees_the_engine(
    tmp_path: Path,
) -> None:
    """A disconnect ends the request that is being answered, also when another one waits behind it."""
    async with router_stack(tmp_path) as stack:
        engine = stack.engines[TierName.FAST]
        engine.answer = ("word ",) * 2000
        engine.delay_s = 0.05
        async with connected(stack) as (reader, writer):
            body = {"prompt": "hi", "tier": "fast", "max_tokens": 2000}
            writer.write(request("/generate", body) * 2)
            await reader.readuntil(b"data: ")
        await until(lambda: engine.running == 0 and stack.leases() == 0)
        assert sum("messages" in received for received in engine.requests) == 1


async def test_requests_in_line_are_answered_in_order_and_bounded(
    tmp_path: Path,
) -> None:
    """A few requests sent at once are answered one by one; very many end the connection."""
    async with router_stack(tmp_path) as stack:
        healthz = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n"
        async with connected(stack) as (reader, writer):
            writer.write(
                (healthz + b"\r\n") * 9 + healthz + b"connection: close\r\n\r\n"
            )
            everything = await asyncio.wait_for(reader.read(), 10)
            assert everything.count(b" 200 OK") == everything.count(b"alive") == 10
        async with connected(stack) as (reader, writer):
            writer.write((healthz + b"\r\n") * 5000)
            everything = await asyncio.wait_for(reader.read(), 10)
            assert everything.count(b" 200 OK") <= 32


async def test_an_early_refusal_reaches_a_client_that_still_sends(
    tmp_path: Path,
) -> None:
    """A body over the limit is answered 413, and the answer can be read while the body is still being sent."""
    async with router_stack(tmp_path, {"server": {"max_body_bytes": 1024}}) as stack:
        async with connected(stack) as (reader, writer):
            writer.write(
                b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2000000\r\n\r\n"
            )
            for _ in range(20):
                writer.write(b"x" * 100_000)
                await writer.drain()
            status, _, body = await answer_of(reader)
            assert status == 413
            assert json.loads(body)["type"] == "urn:qarr:problem:body-too-large"
        await until(lambda: not open_at(port_of(stack)))


def post_whole(url: str, size: int) -> tuple[int, bytes]:
    """Post so many bytes as Python's standard library does, which reads the answer once all of them are sent."""
    # The address is one on loopback.
    post = urllib.request.Request(url, b"x" * size, method="POST")  # noqa: S310
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(post, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@pytest.mark.parametrize(
    ("path", "status"),
    [("/generate", 413), ("/v1/completions", 413), ("/nowhere", 404)],
)
async def test_a_client_that_sends_all_before_it_reads_gets_its_answer(
    tmp_path: Path, path: str, status: int
) -> None:
    """The router still reads twenty megabytes after its answer is made: to close before would reset the connection."""
    async with router_stack(tmp_path) as stack:
        code, body = await asyncio.to_thread(post_whole, stack.url + path, 20_000_000)
        assert code == status
        assert "problem:" in str(body) or "error" in json.loads(body)
        await until(lambda: not open_at(port_of(stack)))


async def test_a_refused_client_is_heard_for_as_long_as_it_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow link may take many times longer than the silence after which a refused client is cut off."""
    monkeypatch.setattr("router.server.http_protocol.LINGER_S", 3.0)
    size = 300_000
    pieces = 30
    async with (
        router_stack(tmp_path, {"server": {"max_body_bytes": 1024}}) as stack,
        connected(stack) as (reader, writer),
    ):
        writer.write(
            b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
            % size
        )
        for _ in range(pieces):
            writer.write(b"x" * (size // pieces))
            await writer.drain()
            await asyncio.sleep(0.15)
        assert (await answer_of(reader))[0] == 413


@pytest.mark.parametrize("endless", [True, False])
async def test_a_refused_client_is_not_heard_for_ever(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    endless: bool,  # noqa: FBT001
) -> None:
    """A client that sends for ever and one that falls silent are cut off: what is read is bounded in bytes and in time."""
    monkeypatch.setattr("router.server.http_protocol.LINGER_S", 0.3)
    bounds = {"server": {"max_body_bytes": 1024, "body_timeout_s": 0.6}}
    async with (
        router_stack(tmp_path, bounds) as stack,
        connected(stack) as (reader, writer),
    ):
        writer.write(
            b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2000000\r\n\r\n"
        )
        assert (await answer_of(reader))[0] == 413
        async with asyncio.timeout(20):
            while open_at(port_of(stack)):
                if endless and not writer.is_closing():
                    writer.write(b"x")
                await asyncio.sleep(0.02)


async def test_a_body_beyond_all_bounds_has_one_answer(tmp_path: Path) -> None:
    """A body that nobody reads is not refused after its answer: a second answer would be taken for the next request's."""
    async with (
        router_stack(tmp_path, {"server": {"max_body_bytes": 1024}}) as stack,
        connected(stack) as (reader, writer),
    ):
        writer.write(
            b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2000000\r\n\r\n"
        )
        for _ in range(20):
            writer.write(b"x" * 100_000)
            await writer.drain()
        status, _, body = await answer_of(reader)
        assert status == 404
        assert body.count(b"HTTP/1.1") == 0


async def test_tiny_chunks_and_trailers_are_bounded(tmp_path: Path) -> None:
    """A body that is almost only framing, and trailers without an end, are refused."""
    async with router_stack(
        tmp_path, {"server": {"max_body_bytes": 1024, "max_header_bytes": 1024}}
    ) as stack:
        head = b"POST /generate HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        for endless in (
            b"1;" + b"e" * 500 + b"\r\nx\r\n",
            b"0\r\n" + b"t: " + b"y" * 500 + b"\r\n",
        ):
            async with connected(stack) as (reader, writer):
                writer.write(head)
                reading = asyncio.create_task(answer_of(reader))
                for number in range(200):
                    if reading.done():
                        break
                    writer.write(
                        endless
                        if number == 0 or endless.startswith(b"1")
                        else endless[3:]
                    )
                    await asyncio.sleep(0.01)
                assert (await reading)[0] == 413


async def test_without_keys_a_foreign_name_is_not_served(tmp_path: Path) -> None:
    """A web page could reach a router on this machine by a name of its own, and read what it answers."""
    async with router_stack(
        tmp_path, {"server": {"allowed_hosts": ("Qarr.example.com",)}}
    ) as stack:
        port = stack.url.rpartition(":")[2]
        for host, status in (
            (f"rebound.example.com:{port}", 421),
            ("rebound.example.com", 421),
            ("127.0.0.1.example.com", 421),
            ("qarr.example.com", 200),
            (f"qarr.example.com:{port}", 200),
            ("localhost", 200),
            (f"localhost:{port}", 200),
            ("app.localhost", 200),
            ("LOCALHOST", 200),
            ("[::1]:80", 200),
            ("10.0.0.7", 200),
            ("router", 421),
            (f"router:{port}", 421),
            ("ai", 421),
            ("127.0.0.1:80@rebound.example.com", 421),
        ):
            answer = await stack.client.get(
                f"{stack.url}/tiers", headers={"host": host}
            )
            assert answer.status_code == status, host
            assert status == 200 or "server.allowed_hosts" in answer.json()["detail"]
        healthz = await stack.client.get(
            f"{stack.url}/healthz", headers={"host": "x.example.com"}
        )
        assert healthz.status_code == 200
    (tmp_path / "more").mkdir()
    keys = tmp_path / "keys.json"
    secret = add_key(keys, "one")[0]
    async with router_stack(
        tmp_path / "more", {"auth": {"keys_file": str(keys)}}
    ) as stack:
        headers = {"host": "rebound.example.com", "authorization": f"Bearer {secret}"}
        with_key = await stack.client.get(f"{stack.url}/tiers", headers=headers)
        assert with_key.status_code == 200


PAGE_ELSEWHERE = {"sec-fetch-site": "cross-site", "origin": "https://evil.example"}
PLAIN = {"content-type": "text/plain;charset=UTF-8"}


POSTED: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"prompt": "hi"}),
    ("/route", {"prompt": "hi"}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "hi"}], "stream": True},
    ),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/embeddings", {"input": "hi"}),
    ("/tokenize", {"prompt": "hi"}),
    ("/detokenize", {"tokens": [1]}),
    ("/admin/replicas/fast-0/drain", {}),
    ("/nowhere", {}),
]


async def test_a_web_page_of_another_origin_cannot_post_without_a_key(
    tmp_path: Path,
) -> None:
    """A page may have a browser send plain text without permission; the request is refused and reaches no engine."""
    async with router_stack(tmp_path) as stack:
        own = stack.url
        foreign = (
            PAGE_ELSEWHERE,
            {"sec-fetch-site": "cross-site"},
            {"sec-fetch-site": "same-site", "origin": own},
            {"origin": "https://evil.example"},
            {"origin": "null"},
            {"origin": "http://127.0.0.1:1"},
            {"origin": own.replace("127.0.0.1", "localhost")},
            {"origin": ""},
        )
        for (path, body), headers in product(POSTED, foreign):
            answer = await stack.client.post(
                own + path, content=json.dumps(body), headers={**PLAIN, **headers}
            )
            assert answer.status_code == 403, (path, headers)
            assert answer.headers["connection"] == "close"
            problem = answer.json()
            kind = problem.get("type") or problem["error"]["code"]
            assert kind in {"urn:qarr:problem:foreign-page", "foreign_page"}
            assert "qarr keys add" in str(problem)
        for engine in stack.engines.values():
            assert not [sent for sent in engine.requests if sent.get("stream")]


async def test_its_own_page_and_programs_may_post_without_a_key(tmp_path: Path) -> None:
    """The router's page, whichever headers its browser sends, curl with its form type, and other programs are served."""
    async with router_stack(
        tmp_path, {"server": {"allowed_hosts": ("qarr.example",)}}
    ) as stack:
        port = stack.url.rpartition(":")[2]
        for headers in (
            {"origin": stack.url, "sec-fetch-site": "same-origin"},
            {"origin": stack.url},
            {"origin": f"http://localhost:{port}", "host": f"LOCALHOST:{port}"},
            {"origin": "https://qarr.example", "host": "qarr.example"},
            {"origin": "https://qarr.example", "host": "qarr.example:443"},
            {"sec-fetch-site": "none", "origin": "chrome-extension://abc"},
            {"content-type": "application/x-www-form-urlencoded"},
            {},
        ):
            body = json.dumps({"prompt": "hi", "stream": False})
            answer = await stack.client.post(
                f"{stack.url}/generate", content=body, headers=headers
            )
            assert answer.status_code == 200, headers
        seen = await stack.client.get(f"{stack.url}/tiers", headers=PAGE_ELSEWHERE)
        assert seen.status_code == 200
        # Without this header no page of another origin can read the answer.
        assert "access-control-allow-origin" not in seen.headers


async def test_a_key_says_enough_about_who_sends(tmp_path: Path) -> None:
    """A page of another origin cannot make a browser add a key, so a request with a key is its sender's own."""
    secret = add_key(tmp_path / "keys.json", "one")[0]
    async with router_stack(
        tmp_path, {"auth": {"keys_file": str(tmp_path / "keys.json")}}
    ) as stack:
        keyed = {**PAGE_ELSEWHERE, "authorization": f"Bearer {secret}"}
        body = {"prompt": "hi", "stream": False}
        url = f"{stack.url}/generate"
        with_key = await stack.client.post(url, json=body, headers=keyed)
        assert with_key.status_code == 200
        without = await stack.client.post(url, json=body, headers=PAGE_ELSEWHERE)
        assert without.status_code == 401
