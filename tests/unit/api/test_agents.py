"""Sessions of agents, recorded by ``benchmarks/agents.py``, against the router in front of scripted engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agents.engine import AgentEngine, pieces_of
from tests.agents.errand import TITLE
from tests.agents.reading import read_turn
from tests.agents.recording import FOLDER, read_recording
from tests.agents.stack import errand_of

pytestmark = pytest.mark.anyio
RECORDED = sorted(file.stem for file in FOLDER.glob("*.jsonl"))


@pytest.mark.parametrize("name", RECORDED)
async def test_a_recorded_session_is_answered(tmp_path: Path, name: str) -> None:
    """Each request of a session is sent as its agent sent it: the engine gets all of it, and the agent the engine's turn."""
    async with errand_of(tmp_path, Path("/repository")) as errand:
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
                path = request.path.partition("?")[0]
                script_turn = errand.script.answer(path, request.body)
                assert read_turn(path, answer.text) == script_turn


KINDS = ("thought", "text", "name", "arguments")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("name", RECORDED)
async def test_no_turn_is_lost_with_an_engine(
    tmp_path: Path, name: str, kind: str, tokens: int
) -> None:
    """An engine dies in the last turn with such a token; the agent gets the turn whole, as from one engine."""
    async with errand_of(tmp_path, Path("/repository")) as errand:
        for request in read_recording(name):
            path = request.path.partition("?")[0]
            turn = errand.script.answer(path, request.body)
            written = [piece.kind for piece in pieces_of(turn)]
            if written.count(kind) < tokens or turn.text == TITLE:
                continue
            AgentEngine.kill_next_in = kind
            AgentEngine.tokens_until_kill = tokens
            answer = await errand.stack.client.post(
                f"{errand.stack.url}{request.path}",
                json=request.body,
                headers=request.headers,
            )
            assert AgentEngine.kill_next_in is None
            assert read_turn(path, answer.text) == turn
            break
        else:
            pytest.skip("no turn of this session has such a token")
