"""The continuation matrix: the real router between a client and engines that play recordings and break off."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from tests.fakes.engine import Behaviour
from tests.unit.continuation.answers import Answer, read_answer
from tests.unit.continuation.moments import Moments, moments_of
from tests.unit.continuation.recording import Recordings
from tests.unit.continuation.requests import (
    ADAPTER_NAME,
    CellRequest,
)
from tests.unit.continuation.scripted_engine import ScriptedEngine, Stage
from tests.unit.router_stack import router_stack
from tiers.breaker import BreakerOptions
from tiers.spec import STANDARD_TIERS

# No replica is left out, and no retry is refused, because of all the answers that break off here.
_ANY_NUMBER = 10**9
SETTINGS = {
    "upstream": {
        "breaker": BreakerOptions(failures=_ANY_NUMBER, failure_share=2.0),
        "retry_reserve": _ANY_NUMBER,
    },
}
OK = 200


class Outcome(StrEnum):
    """What a client has of an answer whose engine broke off."""

    EXACT = "continued exactly"
    MEANING = "continued in meaning"
    AGAIN = "started again"
    ERROR = "ends with an error"
    WRONG = "wrong"
    DOUBLED = "doubled"
    CUT = "silently cut"


NEVER = (Outcome.WRONG, Outcome.DOUBLED, Outcome.CUT)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one break.

    Attributes:
        reason: Why it is no exact answer; empty for one that is.
    """

    outcome: Outcome
    reason: str = ""


@dataclass(slots=True)
class Client:
    """A client of the router, which keeps its connection while that is open."""

    url: str
    _reader: asyncio.StreamReader | None = None
    _writer: asyncio.StreamWriter | None = None

    async def post(self, path: str, body: bytes) -> tuple[int, str]:
        """Return the status of an answer, and all of its body; ``IncompleteReadError``: it broke off."""
        address = urlsplit(self.url)
        if self._writer is None or self._writer.is_closing():
            self._reader, self._writer = await asyncio.open_connection(
                address.hostname, address.port
            )
        assert self._reader is not None
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {address.netloc}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + body)
        try:
            return await self._answer(self._reader)
        except BaseException:
            self.close()
            raise

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[int, str]:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        status = int(head.split(" ", 2)[1])
        headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
        if "content-length" in headers:
            data = await reader.readexactly(int(headers["content-length"]))
        else:
            data = await _read_chunks(reader)
        if headers.get("connection") == "close":
            self.close()
        return status, data.decode()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    chunks = []
    while True:
        size = int(await reader.readuntil(b"\r\n"), 16)
        chunk = await reader.readexactly(size + 2)
        if not size:
            return b"".join(chunks)
        chunks.append(chunk[:-2])


@dataclass(slots=True)
class Matrix:
    """A running router, its engines' stage, and its client."""

    client: Client
    stage: Stage
    _wholes: dict[CellRequest, Answer] = field(default_factory=dict)
    _bodies: dict[CellRequest, bytes] = field(default_factory=dict)
    _sent: dict[CellRequest, tuple[bytes, Moments]] = field(default_factory=dict)

    async def stream_of(self, request: CellRequest) -> tuple[bytes, Moments]:
        """Return the bytes that the engine which begins sends, and their moments."""
        if request not in self._sent:
            await self._whole(request)
        return self._sent[request]

    async def break_at(
        self,
        request: CellRequest,
        breaks: Sequence[int],
        *,
        is_piecewise: bool = False,
    ) -> Verdict:
        """Ask the router while its engines break off after so many bytes, one after the other; judge what comes."""
        whole = await self._whole(request)
        try:
            status, text = await self._ask(request, breaks, is_piecewise=is_piecewise)
        except asyncio.IncompleteReadError:
            return Verdict(Outcome.ERROR, "the connection broke off")
        if self.stage.faults:
            return Verdict(
                Outcome.WRONG, f"an engine was asked with {self.stage.faults[0]}"
            )
        if status != OK:
            return Verdict(Outcome.ERROR, f"HTTP {status}: {text}")
        answer = read_answer(request.endpoint, text)
        return _judge(answer, whole, self.stage)

    async def _whole(self, request: CellRequest) -> Answer:
        """Return the answer that does not break off."""
        if request in self._wholes:
            return self._wholes[request]
        status, text = await self._ask(request, ())
        assert status == OK, f"{request.name}: {text}"
        assert not self.stage.faults, f"{request.name}: {self.stage.faults}"
        assert len(self.stage.asked) == 1
        answer = read_answer(request.endpoint, text)
        assert not answer.faults, f"{request.name}: {answer.faults}\n{text}"
        assert answer.error is None, f"{request.name}: {answer.error}"
        self._wholes[request] = answer
        self._sent[request] = (
            self.stage.sent[0],
            moments_of(
                request,
                self.stage.recordings,
                self.stage.first_way,
                tells_tokens=self.stage.first_tells_tokens,
            ),
        )
        return answer

    async def _ask(
        self,
        request: CellRequest,
        breaks: Sequence[int],
        *,
        is_piecewise: bool = False,
    ) -> tuple[int, str]:
        if request not in self._bodies:
            self._bodies[request] = json.dumps(request.body).encode()
        self.stage.set(request, breaks, is_piecewise=is_piecewise)
        return await self.client.post(request.endpoint, self._bodies[request])


def _judge(answer: Answer, whole: Answer, stage: Stage) -> Verdict:
    """Compare what a client has with the answer that did not break off."""
    if answer.error is not None:
        return _judge_part(answer, whole)
    fault = _fault_of_whole(answer, whole)
    if fault is not None:
        return fault
    if answer.details != whole.details:
        reason = f"{answer.details} rather than {whole.details}"
        return Verdict(Outcome.MEANING, reason)
    if any(not asked.known for asked in stage.asked[1:]):
        return Verdict(Outcome.AGAIN)
    return Verdict(Outcome.EXACT)


def _judge_part(answer: Answer, whole: Answer) -> Verdict:
    """Compare the part of an answer that came before its error with the answer that did not break off."""
    assert answer.error is not None
    if answer.faults:
        return Verdict(Outcome.WRONG, "; ".join(answer.faults))
    contents = _contents(whole)
    for place, text in _contents(answer).items():
        if not contents.get(place, "").startswith(text):
            fault = f"{place} is {text!r}, of {contents.get(place)!r}"
            return Verdict(Outcome.WRONG, fault)
    return Verdict(Outcome.ERROR, answer.error)


def _contents(answer: Answer) -> dict[str, str]:
    """Return all that the model wrote, by where it stands."""
    contents = {f"text {index}": text for index, text in answer.texts.items()}
    contents["thought"] = answer.thought
    for number, call in enumerate(answer.calls):
        contents[f"name of call {number}"] = call.name
        contents[f"arguments of call {number}"] = call.arguments
    return contents


def _fault_of_whole(answer: Answer, whole: Answer) -> Verdict | None:
    """Return how an answer differs from the one that did not break off; None: the client has the same."""
    if not answer.is_ended:
        return Verdict(Outcome.CUT, f"no end: {answer.faults}")
    contents = _contents(answer)
    wanted = _contents(whole)
    if contents != wanted:
        return Verdict(_kind_of(contents, wanted), f"{contents} rather than {wanted}")
    for name in ("order", "finish_reasons", "usage"):
        if getattr(answer, name) != getattr(whole, name):
            reason = f"{name} is {getattr(answer, name)}, not {getattr(whole, name)}"
            return Verdict(Outcome.WRONG, reason)
    if answer.faults:
        return Verdict(Outcome.WRONG, "; ".join(answer.faults))
    return None


def _kind_of(contents: Mapping[str, str], wanted: Mapping[str, str]) -> Outcome:
    """Tell in which way what the model wrote is not what was wanted."""
    if all(wanted.get(place, "").startswith(text) for place, text in contents.items()):
        return Outcome.CUT
    length = sum(map(len, contents.values()))
    if length > sum(map(len, wanted.values())):
        return Outcome.DOUBLED
    return Outcome.WRONG


@asynccontextmanager
async def running_matrix(
    tmp_path: Path, recordings: Recordings, *, resumes: bool
) -> AsyncIterator[Matrix]:
    """Run a router in front of engines that play recordings; they resume answers, or know nothing of that."""
    stage = Stage(recordings, resumes)
    adapters = {ADAPTER_NAME: f"/adapters/{ADAPTER_NAME}"}
    behaviours = {
        tier: Behaviour(adapters=dict(adapters), thinks=True) for tier in STANDARD_TIERS
    }
    wrap = partial(ScriptedEngine, stage=stage)
    async with router_stack(tmp_path, SETTINGS, wrap=wrap, **behaviours) as stack:
        client = Client(stack.url)
        yield Matrix(client, stage)
        client.close()
        assert stack.leases() == 0
