"""Cutting prompts on request: what is dropped, what stays, and that the count is right to the token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from classifier import EstimatingCounter, TokenCounter
from router.api.openai_prompt import read_chat
from router.api.truncation import Cutter, cut_prompts
from router.pipeline.request import Truncate
from router.upstream.json_object import JsonObject
from tests.unit.pipeline.calls import asked_for
from tests.unit.router_stack import router_stack
from tiers.spec import ReplicaStatus, TemplateTokens, TierName

TEMPLATE = TemplateTokens(alone=10, with_system=15, further_pair=10)
CONTEXTS = {
    "tiers": {
        name: {"max_model_len": size}
        for name, size in (("fast", 100), ("balanced", 150), ("precise", 200))
    }
}


class Words(TokenCounter):
    """Counts words: a tokenizer whose counts a test can see."""

    @property
    def exact(self) -> bool:
        return True

    def count(self, text: str) -> int:
        return len(text.split())


def cutter(how: Truncate, room: int, counter: TokenCounter | None = None) -> Cutter:
    return Cutter(how, 1000, room=room, counter=counter or Words(), template=TEMPLATE)


def said(role: str, text: str, words: int, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": f"{text} " * words, **more}


CALL = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
CHAT = [
    said("system", "s", 5),
    said("user", "a", 20),
    said("assistant", "b", 20),
    said("user", "c", 20),
    said("assistant", "", 0, tool_calls=CALL),
    said("tool", "d", 20, tool_call_id="1"),
    said("assistant", "e", 20),
    said("user", "f", 20),
]


def total(messages: list[dict[str, Any]]) -> int:
    document = JsonObject.parse(json.dumps({"messages": messages}).encode())
    prompt = read_chat(document, Words())
    return asked_for(prompt).query(prompt.classify(Words()), TEMPLATE).prompt_tokens


@pytest.mark.parametrize(
    ("room", "left"),
    [
        (1000, "s a b c  d e f"),
        (total(CHAT), "s a b c  d e f"),
        (total(CHAT) - 1, "s c  d e f"),
        (60, "s f"),
        (40, "s f"),
    ],
)
def test_whole_oldest_turns_go_first(room: int, left: str) -> None:
    """The system prompt and the last user message stay, a call stays with its result; no more goes than must."""
    made = cutter("oldest", room).chat(CHAT, 0)
    assert made is not None
    assert " ".join(message["content"].strip()[:1] for message in made) == left
    assert total(made) <= room


def test_what_must_stay_and_does_not_fit_is_not_cut() -> None:
    """Nothing is half done: the request is refused as too long, as without the wish."""
    assert cutter("oldest", total([CHAT[0], CHAT[-1]]) - 1).chat(CHAT, 0) is None
    assert cutter("oldest", 60).chat(CHAT, 40) is None
    assert cutter("middle", 20).chat(CHAT, 0) is None
    assert (
        cutter("middle", 20).chat(
            [{"role": "user", "content": [{"type": "text", "text": "a " * 90}]}], 0
        )
        is None
    )


def test_an_agents_old_steps_go_with_their_results() -> None:
    """After the last message of the user, calls are dropped with what they returned; the latest step stays."""
    steps = [
        step
        for n in range(4)
        for step in (said("assistant", "x", n, tool_calls=CALL), said("tool", "y", 20))
    ]
    chat = [said("user", "q", 5), *steps]
    made = cutter("oldest", total([chat[0], *steps[4:]])).chat(chat, 0)
    assert made == [chat[0], *steps[4:]]
    assert cutter("oldest", total([chat[0], *steps[6:]])).chat(chat, 0) == [
        chat[0],
        *steps[6:],
    ]
    assert cutter("oldest", total([chat[0], *steps[6:]]) - 1).chat(chat, 0) is None


@pytest.mark.parametrize(
    "counter", [Words(), EstimatingCounter()], ids=["exact", "estimating"]
)
@pytest.mark.parametrize("most", [1, 7, 50, 999])
def test_a_text_is_cut_at_its_front_or_in_its_middle(
    counter: TokenCounter, most: int
) -> None:
    """To nearly as many tokens as it may have and never more, whatever they are."""
    text = " ".join(f"w{n}" for n in range(1000))
    end = cutter("oldest", 0, counter).text(text, most)
    both = cutter("middle", 0, counter).text(text, most)
    for kept in (end, both):
        assert most - 6 <= counter.count(kept) <= most
    assert text.endswith(end)
    half = len(both) // 2
    assert text.startswith(both[: len(both) - half])
    assert text.endswith(both[len(both) - half :])
    assert not cutter("oldest", 0, counter).text(text, 0)


def test_the_middle_of_the_longest_message_goes() -> None:
    """The system prompt's never, and the others stay whole."""
    chat = [
        said("system", "s", 300),
        said("user", "a", 20),
        said("assistant", "b", 200),
        said("user", "c", 20),
    ]
    made = cutter("middle", 450).chat(chat, 0)
    assert made is not None
    assert [made[n] for n in (0, 1, 3)] == [chat[n] for n in (0, 1, 3)]
    assert 440 <= total(made) <= 450


@pytest.mark.parametrize(
    ("how", "left"), [("oldest", [6, 7, 8, 9]), ("middle", [0, 1, 8, 9])]
)
def test_ids_are_cut_to_the_token(how: Truncate, left: list[int]) -> None:
    """Several prompts each by themselves; what fits stays as it is."""
    assert cut_prompts(list(range(10)), cutter(how, 4)) == left
    assert cut_prompts([list(range(10)), [1, 2]], cutter(how, 4)) == [left, [1, 2]]
    assert cut_prompts(["a b", "c " * 20], cutter(how, 4)) == [
        "a b",
        cutter(how, 4).text("c " * 20, 4),
    ]
    assert cut_prompts(list(range(10)), cutter("middle", 1)) == [0]


LONG = "word " * 600


@pytest.mark.anyio
async def test_truncation_is_asked_for_and_disclosed(tmp_path: Path) -> None:
    """Without the wish it is the old error; with it a header, the record and ``/route`` say what was cut."""
    async with router_stack(tmp_path, CONTEXTS) as stack:
        body = {"prompt": LONG, "max_tokens": 20, "stream": False}
        assert (
            await stack.client.post(f"{stack.url}/generate", json=body)
        ).status_code == 422
        for how in ("oldest", "middle"):
            body["truncate"] = how
            answer = await stack.client.post(f"{stack.url}/generate", json=body)
            assert answer.status_code == 200
            assert answer.headers["x-qarr-tier"] == "precise"
            told = answer.headers["x-qarr-truncated"]
            assert told.startswith(f"{how}; dropped_tokens=")
            assert told.endswith("; dropped_messages=0")
            assert len(
                stack.engines[TierName.PRECISE].requests[-1]["messages"][0]["content"]
            ) < len(LONG)
            record = (await stack.client.get(f"{stack.url}/requests")).json()[
                "requests"
            ][0]
            assert record["truncated"] == told
            route = (await stack.client.post(f"{stack.url}/route", json=body)).json()
            assert route["truncated"] == told
            assert (route["prompt_tokens"] <= 180) is True
        refused = await stack.client.post(
            f"{stack.url}/generate", json={**body, "truncate": "newest"}
        )
        assert refused.json()["errors"] == [
            {
                "field": "truncate",
                "problem": "should be 'oldest' or 'middle'",
                "allowed": "oldest or middle",
            }
        ]


@pytest.mark.anyio
async def test_a_tier_that_holds_it_all_is_preferred_to_a_cut(tmp_path: Path) -> None:
    """Over a hint; unless the hint is mandatory, the tier is excluded or does not serve: then what may serve is filled."""
    async with router_stack(tmp_path, CONTEXTS) as stack:
        url = f"{stack.url}/generate"
        middle = {
            "prompt": "word " * 100,
            "max_tokens": 10,
            "truncate": "oldest",
            "stream": False,
        }
        whole = await stack.client.post(url, json={**middle, "tier": "fast"})
        assert "x-qarr-truncated" not in whole.headers
        assert whole.headers["x-qarr-tier"] != "fast"
        for more in (
            {"tier": "fast", "tier_policy": "require"},
            {"provider": {"only": ["fast"]}},
        ):
            cut = await stack.client.post(url, json={**middle, **more})
            assert cut.headers["x-qarr-tier"] == "fast"
            assert ("x-qarr-truncated" in cut.headers) is True
        for replica in stack.fleet.replicas:
            if replica.spec.name is not TierName.FAST:
                replica.mark(ReplicaStatus.UNREACHABLE)
        left = await stack.client.post(url, json=middle)
        assert left.headers["x-qarr-tier"] == "fast"
        assert ("x-qarr-truncated" in left.headers) is True


@pytest.mark.anyio
async def test_openais_bodies_are_cut_by_header_or_member(tmp_path: Path) -> None:
    """The rest of the body stays as it is, and nobody else's API has it."""
    async with router_stack(tmp_path, CONTEXTS) as stack:
        chat = [
            {"role": "system", "content": "Be short."},
            *[said(r, "word", 300) for r in ("user", "assistant")],
            said("user", "q", 9),
        ]
        client = openai.AsyncOpenAI(
            base_url=f"{stack.url}/v1", api_key="unused", max_retries=0
        )
        asked: dict[str, Any] = {"model": "auto", "messages": chat, "max_tokens": 20}
        with pytest.raises(openai.BadRequestError, match="context"):
            await client.chat.completions.create(**asked)
        for way in (
            {"extra_headers": {"x-qarr-truncate": "oldest"}},
            {"extra_body": {"qarr": {"truncate": "oldest"}}},
        ):
            raw = await client.chat.completions.with_raw_response.create(**asked, **way)
            assert raw.headers["x-qarr-truncated"].endswith("dropped_messages=2")
            sent = stack.engines[TierName(raw.headers["x-qarr-tier"])].requests[-1]
            assert sent["messages"] == [chat[0], chat[-1]]
            assert sent["max_tokens"] == 20
        completion = await client.completions.with_raw_response.create(
            model="auto",
            prompt=LONG,
            max_tokens=20,
            extra_body={"qarr": {"truncate": "middle"}},
        )
        assert completion.headers["x-qarr-truncated"].startswith("middle; ")
        await client.close()
        body = {
            "model": "auto",
            "messages": chat,
            "max_tokens": 20,
            "qarr": {"truncate": "oldest"},
        }
        other = await stack.client.post(f"{stack.url}/v1/messages", json=body)
        assert other.status_code == 400
        assert ("truncate: is not supported at /v1/messages" in other.text) is True
