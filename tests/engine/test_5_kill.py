"""A real engine is killed in the middle of answers of all kinds; another one resumes them, and their callers see no break.

Both compute in float32, so that each answer is, to its last character, the one that nobody broke off. Plain texts, which any
engine continues, are in ``test_8_continuation.py``.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from router.deployment.layout import prepare_options
from router.settings import load_settings
from tests.engine.chart_processes import until_ok
from tests.engine.in_process import real_router
from tests.engine.resuming import (
    CHAT,
    MESSAGES,
    MODEL,
    RESPONSES,
    Case,
    Stream,
    started_thinker,
)
from tests.engine.thinking_checkpoint import make_thinking
from tests.ports import reserved_ports
from tests.waiting import within
from tiers.checkpoints.prepare import finished
from tiers.replica import Replica
from tiers.spec import ReplicaStatus

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

    from tiers.fleet import Fleet

TIER = "precise"
NO_THOUGHT = {"chat_template_kwargs": {"enable_thinking": False}}
NOTE = {
    "type": "object",
    "properties": {"note": {"type": "string", "minLength": 600}},
    "required": ["note"],
    "additionalProperties": False,
}
FUNCTION = {"name": "write_note", "description": "Writes.", "parameters": NOTE}
CHAT_TOOL = {
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": "required",
}
MESSAGES_TOOL = {
    "tools": [{"name": "write_note", "input_schema": NOTE}],
    "tool_choice": {"type": "tool", "name": "write_note"},
}
RESPONSES_TOOL = {
    "tools": [{"type": "function", **FUNCTION}],
    "tool_choice": "required",
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "note", "schema": NOTE}}
TOKENS = 160
# The part of an answer that must have begun when the engine is killed, and so many characters of it.
BEGUN = 12
CASES = {
    "a thought": (Case(CHAT, {"max_tokens": TOKENS}), "thought"),
    "a call's arguments": (
        Case(CHAT, {**NO_THOUGHT, **CHAT_TOOL, "max_tokens": TOKENS}),
        "call 0: arguments",
    ),
    "a schema": (
        Case(CHAT, {**NO_THOUGHT, "response_format": SCHEMA, "max_tokens": TOKENS}),
        "text",
    ),
    "a message's thought": (
        Case(MESSAGES, {"max_tokens": TOKENS}),
        "block 0: thinking",
    ),
    "a message's call": (
        Case(MESSAGES, {**NO_THOUGHT, **MESSAGES_TOOL, "max_tokens": TOKENS}),
        "block 0: partial_json",
    ),
    "a response's thought": (
        Case(RESPONSES, {"max_output_tokens": TOKENS}),
        "response.reasoning_text.delta 0",
    ),
    "a response's call": (
        Case(RESPONSES, {**NO_THOUGHT, **RESPONSES_TOOL, "max_output_tokens": TOKENS}),
        "response.function_call_arguments.delta 0",
    ),
}


@dataclass(frozen=True, slots=True)
class Engines:
    """Two engines with the same model. The first one is the tier's only replica until all answers have begun."""

    checkpoint: Path
    first: subprocess.Popen[bytes]
    first_url: str
    second_url: str

    def tiers(self) -> dict[str, dict[str, Any]]:
        precise = {
            "replicas": [{"url": self.first_url}],
            "max_model_len": 1024,
            "max_num_seqs": 16,
            "checkpoint": str(self.checkpoint),
            "checkpoint_digest": None,
        }
        return {TIER: precise}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = tmp_path_factory.mktemp("kill")
    checkpoint = folder / "checkpoint"
    make_thinking(finished(prepare_options(load_settings()))[-1].path, checkpoint)
    with ExitStack() as stack:
        started = []
        for number, port in enumerate(reserved_ports(2)):
            log = folder / f"engine-{number}.out"
            process = stack.enter_context(started_thinker(checkpoint, port, log))
            started.append((process, f"http://127.0.0.1:{port}", log))
        for process, url, log in started:
            until_ok(f"{url}/health", process, log)
        (first, first_url, _), (_, second_url, _) = started
        yield Engines(checkpoint, first, first_url, second_url)


@dataclass(slots=True)
class Caller:
    """A caller of the router, who is in the middle of an answer."""

    name: str
    body: str = ""
    has_begun: asyncio.Event | None = None

    @property
    def stream(self) -> Stream:
        return Stream.of(self.body)

    async def ask(self, http: httpx.AsyncClient) -> None:
        case, begun_part = CASES[self.name]
        body = {**case.body, "model": TIER}
        assert self.has_begun is not None
        async with http.stream("POST", case.path, json=body) as answer:
            assert answer.status_code == 200
            async for text in answer.aiter_text():
                self.body += text
                if len(self.stream.parts().get(begun_part, "")) >= BEGUN:
                    self.has_begun.set()


def test_callers_see_no_break(engines: Engines, tmp_path: Path) -> None:
    """Whatever an answer was in the middle of, it goes on: nothing is missing, doubled or begun anew."""

    async def script() -> tuple[list[Caller], dict[str, Stream]]:
        async with real_router(engines, {TIER: ""}, tmp_path, overrides={}) as (
            url,
            fleet,
        ):
            (first,) = fleet.replicas
            await _learn_capability(first)
            callers = await _break_off(url, fleet, engines)
        return callers, await _unbroken(engines.second_url)

    callers, unbroken = asyncio.run(script())
    for caller in callers:
        stream = caller.stream
        assert stream.parts() == unbroken[caller.name].parts(), caller.name
        _check_identity(stream)


async def _learn_capability(replica: Replica) -> None:
    """Note what an engine announces, as the router does when an engine becomes ready."""
    async with httpx.AsyncClient(trust_env=False) as http:
        listed = await http.get(f"{replica.url}/v1/models")
    replica.update(resumes=listed.headers.get("x-qarr-resume") == "1")
    assert replica.resumes


async def _break_off(url: str, fleet: Fleet, engines: Engines) -> list[Caller]:
    """Ask for all kinds of answers, kill the engine once all are in their midst, and return what the callers got."""
    callers = [Caller(name, has_begun=asyncio.Event()) for name in CASES]
    (first,) = fleet.replicas
    second = Replica(
        f"{TIER}-1",
        first.spec,
        url=engines.second_url,
        api_key="",
        model=MODEL,
        status=ReplicaStatus.READY,
    )
    await _learn_capability(second)
    async with (
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=600) as http,
        asyncio.TaskGroup() as group,
    ):
        for caller in callers:
            group.create_task(caller.ask(http))
        for caller in callers:
            assert caller.has_begun is not None
            await within(
                caller.has_begun.wait(), f"the beginning of {caller.name}", within_s=300
            )
        for caller in callers:
            assert "end" not in caller.stream.parts(), f"{caller.name} is too short"
        fleet.add(second)
        os.killpg(engines.first.pid, signal.SIGKILL)
    return callers


async def _unbroken(url: str) -> dict[str, Stream]:
    """Ask an engine itself for the same answers."""
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=600) as http:
        answers = await asyncio.gather(
            *(http.post(case.path, json=case.body) for case, _ in CASES.values())
        )
    return {
        name: Stream.of(answer.text)
        for name, answer in zip(CASES, answers, strict=True)
    }


def _check_identity(stream: Stream) -> None:
    """Check that events are those of one answer: one id, one beginning, one end, numbered without a gap."""
    kinds = [event.get("type") for event in stream.events]
    numbers = [
        event["sequence_number"]
        for event in stream.events
        if "sequence_number" in event
    ]
    assert numbers == list(range(len(numbers)))
    for once in ("message_start", "message_stop", "response.created"):
        assert kinds.count(once) <= 1
    ids = {event["id"] for event in stream.events if "choices" in event}
    assert len(ids) <= 1
    roles = [
        choice
        for event in stream.events
        for choice in event.get("choices", ())
        if choice["delta"].get("role")
    ]
    assert len(roles) <= 1
