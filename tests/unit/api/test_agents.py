"""Sessions of agents, recorded by ``benchmarks/agents.py``, against the router in front of scripted engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agents.engine import AgentEngine, pieces_of
from tests.agents.errand import TITLE, Script
from tests.agents.reading import read_turn
from tests.agents.recording import FOLDER, RecordedRequest, read_recording
from tests.agents.stack import errand_of

pytestmark = pytest.mark.anyio
REPOSITORY = Path("/repository")
RECORDED = sorted(file.stem for file in FOLDER.glob("*.jsonl"))


@pytest.mark.parametrize("name", RECORDED)
async def test_a_recorded_session_is_answered(tmp_path: Path, name: str) -> None:
    """Each request of a session is sent as its agent sent it: the engine gets all of it, and the agent the engine's turn."""
    async with errand_of(tmp_path, REPOSITORY) as errand:
        posts = [
            request for request in read_recording(name) if request.method == "POST"
        ]
        assert posts
        for request in posts:
            answer = await errand.stack.client.post(
                f"{errand.stack.url}{request.path}",
                json=request.body,
                headers=request.headers,
            )
            assert answer.status_code == 200, answer.text
            (received,) = errand.requests
            for behaviour in errand.stack.engines.values():
                behaviour.requests.clear()
            # vLLM refuses a budget of thoughts that is not below max_tokens.
            allowed = {"thinking": {"type": "adaptive"}}
            missing = {
                member: value
                for member, value in request.body.items()
                if received.get(member) not in (value, allowed.get(member))
                and member != "model"
            }
            assert not missing
            if request.body.get("stream"):
                script_turn = errand.script.answer(request.endpoint, request.body)
                assert read_turn(request.endpoint, answer.text) == script_turn


def turns_with_kinds() -> list[tuple[str, str, RecordedRequest]]:
    """Return of each session the first streamed turn that has tokens of a kind, for each kind."""
    turns: dict[tuple[str, str], RecordedRequest] = {}
    for name in RECORDED:
        for request in read_recording(name):
            turn = Script(REPOSITORY).answer(request.endpoint, request.body)
            if turn.text == TITLE or not request.body.get("stream"):
                continue
            for piece in pieces_of(turn):
                turns.setdefault((name, piece.kind), request)
    return [(name, kind, request) for (name, kind), request in turns.items()]


@pytest.mark.parametrize(
    ("kind", "request_"),
    [
        pytest.param(kind, request, id=f"{name}-{kind}")
        for name, kind, request in turns_with_kinds()
    ],
)
async def test_no_turn_is_lost_with_an_engine(
    tmp_path: Path, kind: str, request_: RecordedRequest
) -> None:
    """An engine dies at such a token; the agent gets the turn whole, as from one engine."""
    async with errand_of(tmp_path, REPOSITORY) as errand:
        AgentEngine.kill_next_in = kind
        answer = await errand.stack.client.post(
            f"{errand.stack.url}{request_.path}",
            json=request_.body,
            headers=request_.headers,
        )
        assert AgentEngine.kill_next_in is None
        script_turn = errand.script.answer(request_.endpoint, request_.body)
        assert read_turn(request_.endpoint, answer.text) == script_turn
        assert ["qarr_resume" in request for request in errand.requests].count(
            True
        ) == 1
