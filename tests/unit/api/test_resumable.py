"""Streams of /generate that outlive their connection: replayed in full, bounded, and never leaked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.api.resumable import ResumableStream, ResumableStreams, StreamGoneError
from router.auth.api_keys import add_key
from tests.fakes.engine import Behaviour
from tests.turned import turned
from tests.unit.router_stack import Stack, events, router_stack
from tests.waiting import until, until_still, within
from tiers.spec import TierName

pytestmark = pytest.mark.anyio
WORDS = tuple(f"w{n} " for n in range(60))
ASKED = {"prompt": "hi", "tier": "precise", "max_tokens": 4096, "resumable": True}


def ids(text: str) -> list[str]:
    return [
        line.removeprefix("id: ")
        for line in text.splitlines()
        if line.startswith("id: ")
    ]


def text_of(text: str) -> str:
    return "".join(data["text"] for name, data in events(text) if name == "message")


@asynccontextmanager
async def begun(
    stack: Stack, **more: Any
) -> AsyncIterator[tuple[httpx.Response, AsyncIterator[str]]]:
    """Ask for a resumable stream, on a connection that is closed at the end."""
    async with (
        httpx.AsyncClient(timeout=20, trust_env=False) as client,
        client.stream("POST", f"{stack.url}/generate", json=ASKED, **more) as answer,
    ):
        yield answer, answer.aiter_text()


async def some(stack: Stack, count: int) -> str:
    """Ask for a resumable stream, read at least so many events, and lose the connection; return what was read."""
    async with begun(stack) as (_, parts):
        seen = ""
        async for part in parts:
            seen += part
            if seen.count("\n\n") >= count:
                break
    return seen[: seen.rfind("\n\n") + 2]


async def resume(stack: Stack, last_id: str, **headers: str) -> httpx.Response:
    """Ask as fetch-based clients do: the same request again, with the last id."""
    return await stack.client.post(
        f"{stack.url}/generate",
        json=ASKED,
        headers={"last-event-id": last_id, **headers},
    )


async def test_a_lost_stream_goes_on_where_it_was(tmp_path: Path) -> None:
    """Everything after the last event comes, once, from the one generation that was under way, and nothing stays."""
    async with router_stack(tmp_path) as stack:
        engine = stack.engines[TierName.PRECISE]
        engine.answer = WORDS
        engine.delay_s = 0.01
        first = await some(stack, 5)
        rest = await resume(stack, ids(first)[-1])
        assert text_of(first) + text_of(rest.text) == "".join(WORDS)
        numbers = [int(i.rsplit(".", 1)[1]) for i in ids(first) + ids(rest.text)]
        assert numbers == list(range(1, len(WORDS) + 2))
        assert [name for name, _ in events(rest.text)][-1] == "done"
        assert rest.headers["x-qarr-tier"] == "precise"
        # the others measure its speed
        assert sum("messages" in asked for asked in engine.requests) == 1
        await until(lambda: engine.running == 0 and stack.leases() == 0)


async def test_a_resumed_stream_may_be_lost_again(tmp_path: Path) -> None:
    """Any number of connections, each going on from what the caller has, add up to the answer."""
    async with router_stack(tmp_path) as stack:
        engine = stack.engines[TierName.PRECISE]
        engine.answer = WORDS
        engine.delay_s = 0.01
        seen = await some(stack, 3)
        for _ in range(4):
            headers = {"last-event-id": ids(seen)[-1]}
            async with begun(stack, headers=headers) as (_, parts):
                more = ""
                async for part in parts:
                    more += part
                    if more.count("\n\n") >= 3:
                        break
            seen += more[: more.rfind("\n\n") + 2]
        seen += (await resume(stack, ids(seen)[-1])).text
        assert text_of(seen) == "".join(WORDS)
        # the others measure its speed
        assert sum("messages" in asked for asked in engine.requests) == 1


async def test_what_was_sent_but_not_received_is_replayed(tmp_path: Path) -> None:
    """From an older event, and from before the first, the same events come again, byte for byte."""
    async with router_stack(tmp_path) as stack:
        stack.engines[TierName.PRECISE].answer = WORDS
        whole = await stack.client.post(f"{stack.url}/generate", json=ASKED)
        stream = whole.headers["x-qarr-stream-id"]
        assert (await resume(stack, f"{stream}.0")).text == whole.text
        assert whole.text.endswith((await resume(stack, f"{stream}.50")).text)
        assert (
            len(events((await resume(stack, f"{stream}.50")).text))
            == len(WORDS) + 1 - 50
        )


async def test_a_caller_that_has_everything_is_told_so(tmp_path: Path) -> None:
    """After the last event there is nothing: 204, which ends an EventSource's attempts, and the stream is forgotten."""
    async with router_stack(tmp_path) as stack:
        whole = await stack.client.post(f"{stack.url}/generate", json=ASKED)
        last = ids(whole.text)[-1]
        nothing = await resume(stack, last)
        assert nothing.status_code == 204
        assert nothing.content == b""
        assert (await resume(stack, last)).status_code == 410


async def test_without_asking_nothing_is_kept(tmp_path: Path) -> None:
    """An ordinary stream numbers its events, and cannot be resumed."""
    async with router_stack(tmp_path) as stack:
        answer = await stack.generate()
        assert ids(answer.text) == [
            str(n) for n in range(1, len(events(answer.text)) + 1)
        ]
        assert "x-qarr-stream-id" not in answer.headers
        refused = await resume(stack, ids(answer.text)[-1])
        assert refused.status_code == 404
        assert refused.json()["type"] == "urn:qarr:problem:stream-not-found"
        assert '"resumable": true' in refused.json()["detail"]


async def test_ids_that_never_were_are_404(tmp_path: Path) -> None:
    """Whatever a caller takes for an id: a problem that says what to do."""
    async with router_stack(tmp_path) as stack:
        for wrong in (
            "x",
            "x.1",
            ".",
            "1",
            "a.b.c",
            "é.1",
            "a" * 5000 + ".1",
            "x.99999999999999999999",
        ):
            headers = [(b"last-event-id", wrong.encode("latin-1"))]
            refused = await stack.client.post(
                f"{stack.url}/generate", json=ASKED, headers=headers
            )
            told = refused.status_code, refused.json()["type"]
            assert told == (404, "urn:qarr:problem:stream-not-found"), wrong[:20]


async def test_events_to_come_cannot_be_resumed_from(tmp_path: Path) -> None:
    """A number beyond the newest event is no event."""
    async with router_stack(tmp_path) as stack:
        whole = await stack.client.post(f"{stack.url}/generate", json=ASKED)
        assert (
            await resume(stack, f"{whole.headers['x-qarr-stream-id']}.1000")
        ).status_code == 404


async def test_a_stream_that_nobody_resumes_is_aborted(tmp_path: Path) -> None:
    """After its time the generation ends in the engine, the lease comes back, and its id is known to be gone."""
    async with router_stack(tmp_path, {"server": {"resume_s": 0.4}}) as stack:
        engine = stack.engines[TierName.PRECISE]
        engine.answer = ("w ",) * 4000
        engine.delay_s = 0.01
        first = await some(stack, 2)
        assert stack.leases() > 0
        await until(lambda: engine.running == 0 and stack.leases() == 0)
        gone = await resume(stack, ids(first)[-1])
        assert gone.status_code == 410
        assert gone.json()["type"] == "urn:qarr:problem:stream-gone"


async def test_generation_goes_on_while_nobody_reads(tmp_path: Path) -> None:
    """The whole answer is made and kept; the engine is free before the caller comes back."""
    async with router_stack(tmp_path) as stack:
        engine = stack.engines[TierName.PRECISE]
        engine.answer = WORDS
        engine.delay_s = 0.005
        first = await some(stack, 2)
        await until(lambda: engine.running == 0 and stack.leases() == 0)
        rest = await resume(stack, ids(first)[-1])
        assert text_of(first) + text_of(rest.text) == "".join(WORDS)


async def test_only_its_own_key_may_resume_a_stream(tmp_path: Path) -> None:
    """Another key is told what it would be told of an id that never was."""
    path = tmp_path / "keys.json"
    mine, others = (add_key(path, name)[0] for name in ("mine", "others"))
    async with router_stack(tmp_path, {"auth": {"keys_file": path}}) as stack:
        authorized = {"authorization": f"Bearer {mine}"}
        whole = await stack.client.post(
            f"{stack.url}/generate", json=ASKED, headers=authorized
        )
        first = ids(whole.text)[0]
        refused = await resume(stack, first, authorization=f"Bearer {others}")
        assert refused.status_code == 404
        assert refused.json()["type"] == "urn:qarr:problem:stream-not-found"
        assert (await resume(stack, first)).status_code == 401
        assert (await resume(stack, first, **authorized)).status_code == 200


async def test_what_is_kept_is_bounded_and_nothing_is_skipped(tmp_path: Path) -> None:
    """A full buffer drops what was taken, and holds the engine back rather than drop what was not."""
    async with router_stack(tmp_path, {"server": {"resume_bytes": 20_000}}) as stack:
        engine = stack.engines[TierName.PRECISE]
        words = tuple(f"{n} " + "x" * 2000 + " " for n in range(3000))
        engine.answer = words
        engine.delay_s = 0.05
        first = await some(stack, 2)
        engine.delay_s = 0
        await until_still(
            lambda: engine.tokens, "the engine to be held back", still_s=0.5
        )
        assert engine.running == 1
        assert engine.tokens < len(words)
        rest = await resume(stack, ids(first)[-1])
        assert rest.status_code == 200
        assert text_of(first) + text_of(rest.text) == "".join(words)
        early = await resume(stack, ids(first)[0])
        assert early.status_code == 410
        assert early.json()["type"] == "urn:qarr:problem:stream-gone"
        assert "are no longer kept" in early.json()["detail"]


async def test_more_streams_than_may_be_kept_are_served_all_the_same(
    tmp_path: Path,
) -> None:
    """Beyond the bound a stream is an ordinary one, and shows it; one that is over makes room."""
    async with router_stack(tmp_path, {"server": {"resume_streams": 1}}) as stack:
        engine = stack.engines[TierName.PRECISE]
        engine.answer = WORDS
        engine.delay_s = 0.01
        async with begun(stack) as (answer, parts):
            first = await anext(parts)
            assert "x-qarr-stream-id" in answer.headers
            second = await stack.client.post(f"{stack.url}/generate", json=ASKED)
            assert "x-qarr-stream-id" not in second.headers
            assert text_of(second.text) == "".join(WORDS)
            async for part in parts:
                first += part
            assert text_of(first) == "".join(WORDS)
        third = await stack.client.post(f"{stack.url}/generate", json=ASKED)
        assert "x-qarr-stream-id" in third.headers
        assert (await resume(stack, ids(first)[0])).status_code == 410


async def test_the_last_connection_reads_on(tmp_path: Path) -> None:
    """A caller that comes back before the loss was noticed takes its stream over; the old connection is told."""
    async with router_stack(tmp_path) as stack:
        engine = stack.engines[TierName.PRECISE]
        engine.answer = WORDS
        engine.delay_s = 0.02
        async with begun(stack) as (_, parts):
            old = await anext(parts)
            rest = await resume(stack, ids(old)[0])
            async for part in parts:
                old += part
        assert events(old)[-1][0] == "error"
        assert events(old)[-1][1]["type"] == "urn:qarr:problem:resumed-elsewhere"
        assert text_of(rest.text) == "".join(WORDS[1:])
        # the others measure its speed
        assert sum("messages" in asked for asked in engine.requests) == 1


async def test_a_caller_that_leaves_before_the_first_token_frees_the_engine(
    tmp_path: Path,
) -> None:
    """Without an id nobody could come back, so nothing is kept."""
    async with router_stack(tmp_path, {"server": {"resume_s": 3600}}) as stack:
        engine = stack.engines[TierName.PRECISE]
        engine.answer = ("w ",) * 400
        engine.delay_s = 1.0
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", int(stack.url.rsplit(":", 1)[1])
        )
        body = json.dumps(ASKED).encode()
        writer.write(
            b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
            % len(body)
            + body
        )
        await until(lambda: engine.running)
        writer.close()
        await until(lambda: engine.running == 0 and stack.leases() == 0)
        del reader


async def test_what_fails_before_it_begins_is_answered_as_always(
    tmp_path: Path,
) -> None:
    """A resumable stream that no engine begins is a 503 problem, and nothing is kept of it."""
    async with router_stack(tmp_path, {"server": {"resume_streams": 1}}) as stack:
        for engine in stack.engines.values():
            engine.status = 500
        for _ in range(3):
            refused = await stack.client.post(f"{stack.url}/generate", json=ASKED)
            assert refused.status_code == 503
            assert refused.json()["type"] == "urn:qarr:problem:no-engine-answered"
        for engine in stack.engines.values():
            engine.status = 200
        answer = await stack.client.post(f"{stack.url}/generate", json=ASKED)
        assert "x-qarr-stream-id" in answer.headers
        assert stack.leases() == 0


async def test_a_stream_never_ends_cleanly_on_a_caller_that_cannot_have_it(
    tmp_path: Path,
) -> None:
    """Wishes that contradict each other are told: a whole answer cannot be resumed."""
    async with router_stack(tmp_path) as stack:
        refused = await stack.generate(resumable=True, stream=False)
        assert refused.status_code == 400
        assert {e["field"] for e in refused.json()["errors"]} == {"resumable"}


async def test_lost_streams_leave_no_tasks(tmp_path: Path) -> None:
    """Streams that were lost at all stages, and not resumed, end with their time: tasks, leases and engine requests."""
    async with router_stack(tmp_path, {"server": {"resume_s": 0.5}}) as stack:
        engine = stack.engines[TierName.PRECISE]
        engine.answer = ("w ",) * 4000
        engine.delay_s = 0.01
        await until(lambda: stack.leases() == 0)
        before = len(asyncio.all_tasks())
        await asyncio.gather(*(some(stack, count) for count in (1, 2, 3, 5, 8) * 4))
        assert stack.leases() > 0
        await until(lambda: engine.running == 0 and stack.leases() == 0)
        await until(lambda: len(asyncio.all_tasks()) <= before)


async def test_streams_that_are_kept_end_with_the_router(tmp_path: Path) -> None:
    """A router that stops does not wait for streams that nobody reads, and leaves no request in an engine."""
    behaviour = Behaviour()
    async with router_stack(
        tmp_path, {"server": {"resume_s": 3600}}, precise=behaviour
    ) as stack:
        behaviour.answer = ("w ",) * 4000
        behaviour.delay_s = 0.01
        await some(stack, 2)
        fleet = stack.fleet
        assert behaviour.running == 1
    assert all(replica.state.in_flight == 0 for replica in fleet.replicas)
    await until(lambda: behaviour.running == 0)


BOUNDS = turned(
    {"server": {"resume_streams": 4, "resume_bytes": 40_000, "resume_s": 0.3}}
).server


async def begin(_headers: Any) -> None:
    """Send an answer's head to nobody."""


async def nowhere(_message: Any) -> None:
    """Send an event to nobody."""


async def lose(reader: asyncio.Task[None]) -> None:
    reader.cancel()
    await asyncio.wait({reader})


async def test_a_slow_reader_of_what_others_had_taken_misses_nothing() -> None:
    """What a lost connection had taken is kept for the next one that still needs it; the engine waits for it."""
    streams = ResumableStreams(BOUNDS)
    go = asyncio.Event()
    made = 0

    async def work(stream: ResumableStream) -> None:
        nonlocal made
        stream.begin({})
        for made in range(1, 1001):
            if made == 700:
                await within(go.wait(), "the test to let it go on")
            event = b"data: " + b"x" * 100 + b"\n\n"
            if made == 1000:
                await stream.end([event])
            elif not stream.write([event]):
                await stream.drain()

    stream = streams.open("key", work, "request")
    assert stream is not None
    first = asyncio.create_task(streams.read(stream, 0, begin, nowhere))
    await until(lambda: made == 700 and stream._last_read == 699)
    await lose(first)
    after = stream.oldest + 5
    seen: list[int] = []

    async def slow(message: Any) -> None:
        await asyncio.sleep(0.005)
        seen.extend(
            int(line.rsplit(b".", 1)[1])
            for line in message["body"].splitlines()
            if line.startswith(b"id: ")
        )

    go.set()
    await streams.read(*streams.find(f"{stream.id}.{after}", "key"), begin, slow)
    assert seen == list(range(after + 1, 1001))
    await streams.aclose()


async def test_a_stream_that_is_read_is_not_ended_by_readers_before() -> None:
    """Two connections are lost, one after the other; who reads now goes on reading."""
    streams = ResumableStreams(BOUNDS)
    gate = asyncio.Event()

    async def work(stream: ResumableStream) -> None:
        stream.begin({})

        def write_until_told_to_end() -> bool:
            stream.write([b"data: x\n\n"])
            return gate.is_set()

        await until(write_until_told_to_end, poll_s=0.01)
        await stream.end([b"data: end\n\n"])

    async def stuck(_message: Any) -> None:
        await asyncio.Event().wait()

    stream = streams.open("key", work, "request")
    assert stream is not None
    first = asyncio.create_task(streams.read(stream, 0, begin, stuck))
    await until(lambda: stream.newest > 2)
    before = stream.reader
    second = asyncio.create_task(streams.read(stream, 0, begin, nowhere))
    await until(lambda: stream.reader is not before)
    await lose(second)
    await lose(first)
    third = asyncio.create_task(streams.read(stream, 0, begin, nowhere))
    await asyncio.sleep(2 * BOUNDS.resume_s)  # the time of those before is over
    gate.set()
    await third
    await streams.aclose()


async def test_who_reads_a_stream_that_is_dropped_is_told() -> None:
    """It does not wait for events that never come."""
    streams = ResumableStreams(BOUNDS)

    async def work(stream: ResumableStream) -> None:
        stream.begin({})
        stream.write([b"data: x\n\n"])
        await asyncio.Event().wait()

    stream = streams.open("key", work, "request")
    assert stream is not None
    reader = asyncio.create_task(streams.read(stream, 0, begin, nowhere))
    await until(lambda: stream.newest > 0)
    streams.drop(stream)
    with pytest.raises(StreamGoneError):
        await reader
    await streams.aclose()


async def test_one_key_leaves_others_room(tmp_path: Path) -> None:
    """However many streams a key asks for, it gets a part of what may be kept, and takes no other key's place."""
    keys_file = tmp_path / "keys.json"
    greedy, other = (
        {"authorization": f"Bearer {add_key(keys_file, name)[0]}"}
        for name in ("greedy", "other")
    )
    settings = {
        "auth": {"keys_file": str(keys_file)},
        "server": {"resume_streams": 10, "resume_s": 600},
    }
    async with router_stack(tmp_path, settings) as stack:
        engine = stack.engines[TierName.PRECISE]

        async def kept(headers: dict[str, str]) -> str | None:
            """Ask for a stream and leave it; return its last event's id, or None where it is not kept."""
            async with begun(stack, headers=headers) as (answer, parts):
                await anext(parts)
                name = answer.headers.get("x-qarr-stream-id")
            return f"{name}.0" if name else None

        first = await kept(other)
        assert first
        await until(lambda: engine.running == 0)
        for _ in range(20):  # these end, and are not read to their ends
            assert await kept(greedy)
        assert (await resume(stack, first, **other)).status_code == 200
        engine.answer = WORDS
        engine.stall_after = 2
        given = [await kept(greedy) for _ in range(10)]
        assert 0 < sum(name is not None for name in given) < 10
        mine = await kept(other)
        assert mine
        assert (await resume(stack, mine, **greedy)).status_code == 404
