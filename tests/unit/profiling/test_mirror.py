"""A share of answered requests is asked again of a second fleet: compared, counted, and never waited for."""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from classifier import PromptClass
from router.auth.api_keys import add_key
from router.profiling.mirror_comparison import AnswerText, MirrorOutcome, common_prefix, compare
from router.settings import PROJECT, MirrorSettings, load_settings
from tests.fakes.engine import ANSWER, Behaviour, FakeEngine, serving
from tests.ports import reserved_ports
from tests.unit.own_engines import until
from tests.unit.router_stack import router_stack
from tiers.spec import TierName

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.unit.router_stack import Stack

pytestmark = pytest.mark.anyio
TEXT, PROMPT, SECRET = "".join(ANSWER), "Which town is the marmalade capital?", "sk-of-the-second-fleet"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": PROMPT}]
OUTCOMES = [outcome.value for outcome in MirrorOutcome]


@asynccontextmanager
async def mirrored(
    tmp_path: Path, there: Behaviour, more: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[Stack]:
    """Run a router that mirrors everything to a fake engine."""
    async with serving(FakeEngine(there).app) as url:
        mirror = {"url": f"{url}/v1", "share": 1.0, "api_key": SECRET, **settings}
        async with router_stack(tmp_path, {"mirror": mirror, **(more or {})}) as stack:
            yield stack


async def summary(stack: Stack, **headers: str) -> dict[str, Any]:
    """Return the summary for operators."""
    answer = await stack.client.get(f"{stack.url}/mirror", headers=headers)
    assert answer.status_code == httpx.codes.OK, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def counted(stack: Stack, count: int) -> dict[str, Any]:
    """Return the row of all mirrored requests, once something became of so many."""
    async with asyncio.timeout(20):
        while True:
            row: dict[str, Any] = (await summary(stack))["all"]
            if sum(row[outcome] for outcome in OUTCOMES) >= count:
                return row
            await asyncio.sleep(0.01)


async def post(stack: Stack, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    """Ask the router, and read the whole answer."""
    answer = await stack.client.post(f"{stack.url}{path}", json=body, headers=headers)
    assert answer.status_code == httpx.codes.OK, answer.text
    return answer


def test_the_documented_settings_are_all_there_are(tmp_path: Path) -> None:
    """The snippet of docs/mirroring.md sets every setting of the section, and is taken."""
    text = (PROJECT / "docs/mirroring.md").read_text("utf-8")
    (snippet,) = re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "qarr.toml").write_text(snippet)
    settings = load_settings(tmp_path / "qarr.toml").mirror
    assert settings.active
    assert settings.model_fields_set == set(MirrorSettings.model_fields)


@pytest.mark.parametrize(
    ("one", "other", "share"),
    [
        ("", "", 1.0),
        ("", "a", 0.0),
        ("abc", "abc", 1.0),
        ("abcd", "abxx", 0.5),
        ("ab", "abcdefgh", 0.25),
        ("é", "e", 0),
    ],
)
def test_the_common_prefix_is_a_share_of_the_longer_text(one: str, other: str, share: float) -> None:
    """The same from both sides."""
    assert common_prefix(one, other) == common_prefix(other, one) == share


@pytest.mark.parametrize(
    ("greedy", "text", "outcome", "prefix"),
    [(True, "four", "same", 1.0), (True, "fore", "differs", 0.5), (False, "four", "sampled", None)],
)
def test_texts_are_compared_where_they_can_be_expected_to_be_equal(
    greedy: bool,  # noqa: FBT001  a case
    text: str,
    outcome: str,
    prefix: float | None,
) -> None:
    """Lengths, times and finish reasons are compared in any case."""
    here, there = AnswerText("four", "stop", 0.5, 2.0), AnswerText(text, "length", 1.0, 1.0)
    found = compare(PromptClass.CODE, TierName.FAST, here, there, greedy=greedy)
    assert (found.outcome, found.common_prefix) == (outcome, prefix)
    assert (found.length, found.ttft, found.duration, found.same_finish) == (1.0, 2.0, 0.5, False)


def test_what_is_not_known_is_not_compared() -> None:
    """An answer that was not streamed has no first token, and an empty one no length to divide by."""
    here, there = AnswerText("", "stop", None, 2.0), AnswerText("a", "stop", 1.0, 1.0)
    found = compare(PromptClass.CODE, TierName.FAST, here, there, greedy=True)
    assert (found.length, found.ttft, found.same_finish, found.common_prefix) == (None, None, True, 0.0)


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(
    ("path", "body", "there_at"),
    [
        ("/generate", {"prompt": PROMPT, "seed": 7, "max_tokens": 20}, CHAT),
        (CHAT, {"messages": MESSAGES, "seed": 7, "max_tokens": 20, "user": "jo", "priority": 3}, CHAT),
        (COMPLETIONS, {"prompt": PROMPT, "seed": 7, "max_tokens": 20, "qarr": {"priority": "batch"}}, COMPLETIONS),
    ],
)
async def test_an_equal_answer_counts_as_the_same(
    tmp_path: Path, path: str, body: dict[str, Any], there_at: str, *, streamed: bool
) -> None:
    """Streamed or not: the second fleet is asked the same, with its own key and nothing that says who the caller is."""
    there = Behaviour()
    async with mirrored(tmp_path, there) as stack:
        asked = {**body, "temperature": 0, "stream": streamed}
        answer = await post(stack, path, asked, cookie="session=abc", **{"x-request-id": "mine"})
        row = await counted(stack, 1)
    assert (row["same"], row["same_share"], row["common_prefix"], row["finish_reason_differs"]) == (1, 1.0, 1.0, 0)
    assert row["duration_ratio"] is not None
    assert (row["ttft_ratio"] is not None) is (streamed or path == "/generate")  # engines stream to /generate always
    (sent,), (headers,) = there.requests, there.headers
    expected = {"model": "fake", "seed": 7, "max_tokens": 20, "temperature": 0, "stream": True}
    prompt = {"prompt": PROMPT} if there_at == COMPLETIONS else {"messages": MESSAGES}
    assert sent == {**expected, **prompt}
    assert headers["authorization"] == f"Bearer {SECRET}"
    assert (headers["x-qarr-mirror"], headers["x-request-id"]) == ("1", answer.headers["x-request-id"])
    assert "cookie" not in headers
    assert "traceparent" not in headers


@pytest.mark.parametrize(
    "more",
    [{"stream": True}, {"stream": False}, {"stream": True, "resumable": True}],
    ids=["stream", "whole", "resumed"],
)
async def test_the_text_is_compared_to_the_letter(tmp_path: Path, more: dict[str, Any]) -> None:
    """Characters that come in two pieces, escapes, and a stop string that is held back are the same on both sides."""
    pieces: tuple[str | bytes, ...] = (
        "Un",
        " caf",
        b"\xc3",
        b"\xa9",
        ' "no\n"',
        " \U0001f600",
        " and EN",
        "D more",
        ".",
    )
    there = Behaviour(answer=pieces)
    async with mirrored(tmp_path, there) as stack:
        for behaviour in stack.engines.values():
            behaviour.answer = pieces
        await stack.generate(temperature=0, stop="END", **more)
        assert (await counted(stack, 1))["same"] == 1
        there.answer = (*pieces[:5], " \U0001f601", *pieces[6:])
        await stack.generate(temperature=0, stop="END", **more)
        row = await counted(stack, 2)
    assert (row["same"], row["differs"], row["same_share"]) == (1, 1, 0.5)


async def test_an_answer_that_failover_continued_is_not_mirrored(tmp_path: Path) -> None:
    """Two engines made it, and its times tell of neither."""
    there = Behaviour()
    async with mirrored(tmp_path, there) as stack:
        stack.engines[TierName.FAST].break_after = 3
        broken = await stack.generate(temperature=0, tier="fast", stream=False)
        assert (broken.json()["text"], broken.json()["continued_on"] != []) == (TEXT, True)
        await stack.generate(prompt="the second", temperature=0, tier="precise")
        assert (await counted(stack, 1))["same"] == 1
    assert [request["messages"][0]["content"] for request in there.requests] == ["the second"]


async def test_the_answers_of_each_class_and_tier_are_told_apart(tmp_path: Path) -> None:
    """Another answer of a greedy request differs, with what both have in common; of a sampled one only its length counts."""
    there = Behaviour(answer=(*ANSWER[:-2], " Lyon", ".", " Or", " so", "."))
    async with mirrored(tmp_path, there, model="other") as stack:
        await stack.generate(temperature=0, tier="fast")
        await counted(stack, 1)
        await stack.generate(temperature=0.7, tier="precise")
        await counted(stack, 2)
        rows = {row["tier"]: row for row in (await summary(stack))["rows"]}
        page = (await stack.client.get(f"{stack.url}/metrics")).text
    fast, precise = rows["fast"], rows["precise"]
    assert (fast["differs"], fast["sampled"], fast["same_share"]) == (1, 0, 0.0)
    assert 0.5 < fast["common_prefix"] < 0.75  # 25 of 39 characters
    assert (precise["differs"], precise["sampled"], precise["same_share"]) == (0, 1, None)
    assert precise["common_prefix"] is None
    assert precise["length_ratio"] > 1
    assert {request["model"] for request in there.requests} == {"other"}
    labels = f'class="{fast["class"]}"'
    assert f'qarr_mirror_requests_total{{{labels},outcome="differs",tier="fast"}} 1.0' in page
    assert f'qarr_mirror_common_prefix_ratio_count{{{labels},tier="fast"}} 1.0' in page


async def test_an_answer_that_ends_otherwise_is_counted(tmp_path: Path) -> None:
    """The second fleet stops by itself where this one is cut off."""
    async with mirrored(tmp_path, Behaviour(answer=ANSWER[:2])) as stack:
        await stack.generate(temperature=0, max_tokens=3)
        row = await counted(stack, 1)
    assert (row["differs"], row["finish_reason_differs"]) == (1, 1)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": MESSAGES, "n": 2}),
        (CHAT, {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "f"}}]}),
        (CHAT, {"messages": MESSAGES, "logprobs": True}),
        (CHAT, {"messages": MESSAGES, "response_format": {"type": "json_object"}}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]}),
        (COMPLETIONS, {"prompt": [PROMPT, PROMPT]}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9, "model": "auto"}),
        ("/v1/responses", {"input": PROMPT, "model": "auto"}),
        ("/route", {"prompt": PROMPT}),
    ],
)
async def test_what_cannot_be_compared_is_not_mirrored(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    """Several answers, tools, images and the like, and other APIs: only the request after it is."""
    there = Behaviour()
    async with mirrored(tmp_path, there) as stack:
        await post(stack, path, body)
        await stack.generate(prompt="the second", temperature=0)
        assert (await counted(stack, 1))["same"] == 1
    assert [request["messages"][0]["content"] for request in there.requests] == ["the second"]


@pytest.mark.parametrize("settings", [{"share": 0.0}, {"url": ""}])
async def test_nothing_is_mirrored_unless_it_is_switched_on(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Without a share, or without an address, the pipeline has no mirror at all."""
    there = Behaviour()
    async with mirrored(tmp_path, there, **settings) as stack:
        assert stack.pipeline.mirror is None
        await stack.generate(temperature=0)
        found = await summary(stack)
    assert (there.requests, found["share"], found["rows"]) == ([], 0.0, [])


@pytest.mark.parametrize(
    ("fault", "logged"),
    [
        ({"status": 500}, "HTTP 500"),
        ({"status": 400, "error": PROMPT}, "HTTP 400"),
        ({"nonsense": PROMPT.encode()}, "no whole answer (EngineBroke)"),
        ({"break_after": 2}, "no whole answer (EngineBroke)"),
        ({"stall_after": 2}, "no whole answer within 0.2 s"),
        ({"instead": {"/v1/models": "[]"}}, "its list of models holds none"),
        ({"instead": {"/v1/models": PROMPT}}, "its list of models holds none"),
    ],
)
async def test_a_failure_is_counted_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: dict[str, Any], logged: str
) -> None:
    """Callers have their answers; the log has one line for many failures, without prompt, answer or key."""
    there = Behaviour(**fault)
    with caplog.at_level(logging.DEBUG, "qarr"):
        async with mirrored(tmp_path, there, timeout_s=0.2 if "stall_after" in fault else 30) as stack:
            for _ in range(3):
                answer = await stack.generate(prompt=PROMPT, temperature=0, stream=False)
                assert answer.json()["text"] == TEXT
            assert (await counted(stack, 3))["failed"] == 3
    (line,) = [record.getMessage() for record in caplog.records if record.name.endswith(".mirror")]
    assert logged in line
    assert not any(secret in caplog.text for secret in (PROMPT, TEXT, SECRET))


async def test_a_second_fleet_that_is_not_there_is_a_failure(tmp_path: Path) -> None:
    """Nobody listens at its address."""
    (port,) = reserved_ports()
    async with mirrored(tmp_path, Behaviour(), url=f"http://127.0.0.1:{port}/v1") as stack:
        assert (await stack.generate(temperature=0, stream=False)).json()["text"] == TEXT
        assert (await counted(stack, 1))["failed"] == 1


async def test_a_mirror_that_hangs_holds_up_nobody(tmp_path: Path) -> None:
    """Answers come while it holds as many requests as it may have; what is more is dropped, and the router still ends."""
    there = Behaviour(hung={CHAT})
    async with mirrored(tmp_path, there, max_in_flight=2, timeout_s=3600) as stack:
        for _ in range(5):
            assert (await stack.generate(temperature=0, stream=False)).json()["text"] == TEXT
        assert (await counted(stack, 3))["dropped"] == 3
        await until(lambda: there.held == 2)
        assert stack.leases() == 0
    await until(lambda: there.held == 0)


async def test_a_mirrored_request_is_not_mirrored_again(tmp_path: Path) -> None:
    """A second router that mirrors as well answers it, and its own second fleet gets nothing of it."""
    last = Behaviour()
    async with mirrored(tmp_path, last) as second:
        mirror = {"url": f"{second.url}/v1", "share": 1.0}
        async with router_stack(tmp_path, {"mirror": mirror}) as first:
            await first.generate(temperature=0)
            assert (await counted(first, 1))["same"] == 1
        (record,) = (await second.client.get(f"{second.url}/requests")).json()["requests"]
        await second.generate(prompt="its own", temperature=0)
        await counted(second, 1)
        own = (await second.client.get(f"{second.url}/requests")).json()["requests"][0]
    assert [request["messages"][0]["content"] for request in last.requests] == ["its own"]
    assert (record["mirrored"], own["mirrored"]) == (True, False)


async def test_a_second_router_gets_the_hint_and_tells_its_tier(tmp_path: Path) -> None:
    """A caller's tier is asked for there too, unless the settings name a model; then another tier serves, and is counted."""
    async with router_stack(tmp_path) as second:
        mirror = {"url": f"{second.url}/v1", "share": 1.0}
        async with router_stack(tmp_path, {"mirror": mirror}) as first:
            await first.generate(temperature=0, tier="precise")
            assert (await counted(first, 1))["tier_differs"] == 0
        async with router_stack(tmp_path, {"mirror": {**mirror, "model": "fast"}}) as first:
            await first.generate(temperature=0, tier="precise")
            assert (await counted(first, 1))["tier_differs"] == 1
        shown = (await second.client.get(f"{second.url}/requests")).json()["requests"]
    assert [request["served_by"] for request in shown] == ["fast", "precise"]


async def test_only_operators_see_the_summary(tmp_path: Path) -> None:
    """With keys, one without --admin is refused; and a caller's key does not go to the second fleet."""
    file, there = tmp_path / "keys.json", Behaviour()
    user, operator = add_key(file, "user")[0], add_key(file, "operator", admin=True)[0]
    async with mirrored(tmp_path, there, {"auth": {"keys_file": str(file)}}, api_key="") as stack:
        headers = {"authorization": f"Bearer {user}"}
        await post(stack, "/generate", {"prompt": PROMPT, "temperature": 0}, **headers)
        await until(lambda: bool(there.headers))
        refused = await stack.client.get(f"{stack.url}/mirror", headers=headers)
        assert refused.status_code == httpx.codes.FORBIDDEN
        assert "url" in await summary(stack, authorization=f"Bearer {operator}")
    assert user not in str(there.headers)
    assert "authorization" not in there.headers[0]
