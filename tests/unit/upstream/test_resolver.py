"""Names of engines: what was found last stays while they do not resolve, and all addresses of a name are tried."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest

from router.upstream import resolver as module
from router.upstream.resolver import AddressInfo, Resolver
from router.upstream.transport import EngineTransport
from tests.waiting import until, within

pytestmark = pytest.mark.anyio
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok"
AWAY = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
UNKNOWN = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
NO_ADDRESS = socket.gaierror(socket.EAI_NODATA, "No address associated with hostname")


class NameServer:
    """Answers as it is told; ``hangs`` holds answers back."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: Sequence[str] = addresses
        self.fault: Exception | None = None
        self.answers = asyncio.Event()
        self.answers.set()
        self.asked = 0

    async def lookup(self, _host: str, port: int) -> list[AddressInfo]:
        self.asked += 1
        await within(self.answers.wait(), "the name server to answer")
        if self.fault is not None:
            raise self.fault
        return [address_info(address, port) for address in self.addresses]


def address_info(address: str, port: int) -> AddressInfo:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port)


@asynccontextmanager
async def engine_at(*addresses: str) -> AsyncIterator[int]:
    """Serve at these addresses, on one port."""

    async def answer(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ANSWER)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, addresses[0], 0) as first:
        port = first.sockets[0].getsockname()[1]
        if len(addresses) == 1:
            yield port
            return
        async with await asyncio.start_server(answer, list(addresses[1:]), port):
            yield port


@asynccontextmanager
async def asking(names: NameServer) -> AsyncIterator[Any]:
    """Yield what asks an engine by its name, over a new connection each time."""
    transport = EngineTransport(resolver=Resolver(names.lookup))

    async def ask(port: int) -> int:
        request = httpx.Request(
            "GET",
            f"http://engine.test:{port}/",
            extensions={"timeout": {"connect": 30.0}},
        )
        response = await transport.handle_async_request(request)
        assert isinstance(response.stream, httpx.AsyncByteStream)
        async for _ in response.stream:
            pass
        return response.status_code

    try:
        yield ask
    finally:
        await transport.aclose()


@pytest.mark.parametrize("fault", [AWAY, UNKNOWN])
async def test_the_last_addresses_stay_while_a_name_does_not_resolve(
    fault: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says it once, and when it is over; a name server that hangs delays no connection but the first."""
    caplog.set_level(logging.INFO, module.log.name)
    names = NameServer("127.0.0.1")
    async with engine_at("127.0.0.1") as port, asking(names) as ask:
        assert await ask(port) == 200
        names.fault = fault
        for _ in range(3):
            assert await ask(port) == 200
        names.answers.clear()
        assert await within(ask(port), "an answer while the name server hangs") == 200
        names.fault = None
        names.answers.set()
        await until(lambda: "engine.test resolves again" in caplog.messages)
        assert await ask(port) == 200
    assert [message.split(" (")[0] for message in caplog.messages] == [
        "engine.test does not resolve",
        "engine.test resolves again",
    ]


async def test_a_name_server_that_hangs_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once a name is known: the look goes on in the background, one for all who connect."""
    monkeypatch.setattr(module, "LOOKUP_S", 0.05)
    names = NameServer("127.0.0.1")
    async with engine_at("127.0.0.1") as port, asking(names) as ask:
        assert await ask(port) == 200
        names.answers.clear()
        assert (
            await within(
                asyncio.gather(*(ask(port) for _ in range(5))), "answers meanwhile"
            )
            == [200] * 5
        )
        assert names.asked == 2
        names.answers.set()


async def test_a_lookup_that_ended_is_not_taken_for_one_that_hangs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another connection may begin the next lookup before the one that waited goes on."""
    connections: list[asyncio.Task[Any]] = []
    lookups = 0

    def connect() -> None:
        connections.append(asyncio.create_task(resolver.addresses("engine.test", 1)))

    async def lookup(_host: str, port: int) -> list[AddressInfo]:
        nonlocal lookups
        lookups += 1
        if lookups == 2:
            asyncio.get_running_loop().call_soon(connect)
        return [address_info("127.0.0.1", port)]

    resolver = Resolver(lookup)
    await resolver.addresses("engine.test", 1)
    await resolver.addresses("engine.test", 1)
    await asyncio.gather(*connections)
    assert lookups == 3
    assert caplog.messages == []


@pytest.mark.parametrize("fault", [AWAY, UNKNOWN, NO_ADDRESS])
async def test_a_name_that_was_never_resolved_is_an_error(fault: Exception) -> None:
    """There is nothing to stay with."""
    names = NameServer()
    names.fault = fault
    async with asking(names) as ask:
        with pytest.raises(httpx.ConnectError, match="its name cannot be resolved"):
            await ask(1)


async def test_a_name_that_has_no_address_any_more_is_left() -> None:
    """The name server knows it, and says that there is no engine; so it is for ``tiers.*.dns``."""
    names = NameServer("127.0.0.1")
    async with engine_at("127.0.0.1") as port, asking(names) as ask:
        assert await ask(port) == 200
        names.fault = NO_ADDRESS
        with pytest.raises(httpx.ConnectError, match="its name cannot be resolved"):
            await ask(port)


async def test_a_changed_address_counts_at_once() -> None:
    """Each new connection looks the name up."""
    names = NameServer("127.0.0.1")
    async with engine_at("127.0.0.2") as port, asking(names) as ask:
        with pytest.raises(httpx.ConnectError):
            await ask(port)
        names.addresses = ["127.0.0.2"]
        assert await ask(port) == 200


async def test_an_address_that_does_not_answer_keeps_no_connection_from_the_next() -> (
    None
):
    """Nothing comes back from the first one, as behind a firewall; the second is tried meanwhile (RFC 8305)."""
    async with (
        engine_at("127.0.0.1") as port,
        asking(NameServer("127.0.0.3", "127.0.0.1")) as ask,
    ):
        with ExitStack() as full, socket.socket() as silent:
            silent.bind(("127.0.0.3", port))
            silent.listen(0)
            # its queue is full then, and the kernel drops what comes
            for _ in range(4):
                waiting = full.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(("127.0.0.3", port))
            assert await within(ask(port), "an answer of the second address") == 200


@pytest.mark.parametrize(
    "addresses",
    [("::1", "127.0.0.1"), ("127.0.0.1", "::1"), ("127.0.0.4", "::1", "127.0.0.1")],
)
async def test_an_engine_in_one_family_is_reached_by_a_name_with_both(
    addresses: tuple[str, ...],
) -> None:
    """vLLM listens on IPv4 alone by default, whatever addresses its machine has."""
    async with engine_at("127.0.0.1") as port, asking(NameServer(*addresses)) as ask:
        for _ in range(3):
            assert await ask(port) == 200


async def test_when_no_address_answers_the_error_says_so() -> None:
    """As for a single address."""
    async with (
        engine_at("127.0.0.1") as port,
        asking(NameServer("127.0.0.5", "127.0.0.6")) as ask,
    ):
        with pytest.raises(httpx.ConnectError, match="refused"):
            await ask(port)
