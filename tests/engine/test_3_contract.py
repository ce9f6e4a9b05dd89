"""The fake engine is honest: one script, run against it and against real vLLM, sees the same surface."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from router.api.paths import MESSAGES, RESPONSES
from router.upstream.named_events import MESSAGE_FORMAT, RESPONSE_FORMAT
from router.upstream.sse import (
    COMPLETION_FORMAT,
    Chunk,
    parse_event,
    read_plain_token,
)
from tests.fakes.engine import FakeEngine, serving
from tiers.checkpoints.precision import root_precision
from tiers.fleet import Fleet
from tiers.lifecycle.idle_speed import IdleSpeed
from tiers.lifecycle.warmup import WarmupPlan
from tiers.probe import EngineProbe
from tiers.replica import Replica
from tiers.spec import PRECISIONS, TierName, TierSpec

if TYPE_CHECKING:
    from tests.engine.conftest import Up
    from tiers.speed import SpeedModel


METRICS = (
    "vllm:num_requests_running{",
    "vllm:kv_cache_usage_perc{",
    "vllm:prompt_tokens_total{",
    "vllm:generation_tokens_total{",
    "vllm:time_to_first_token_seconds_sum{",
    "vllm:time_to_first_token_seconds_count{",
    "vllm:prefix_cache_queries_total{",
    "vllm:prefix_cache_hits_total{",
)


async def script(url: str, key: str) -> dict[str, Any]:
    """Use everything of an engine that QARR uses, and return the shapes of the answers."""
    headers = {"authorization": f"Bearer {key or 'none'}"}
    async with httpx.AsyncClient(
        base_url=url, trust_env=False, timeout=60, headers=headers
    ) as client:
        model = (await client.get("/v1/models")).json()["data"][0]
        common = {
            "model": model["id"],
            "max_tokens": 3,
            "ignore_eos": True,
            "stream": True,
        }
        chat = {**common, **STORY}
        extra = {
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "priority": 0,
        }
        text = {**common, "prompt": "The"}
        metrics = (await client.get("/metrics")).text
        return {
            "health": (await client.get("/health")).status_code,
            "model": [
                type(model[name]).__name__
                for name in ("id", "root", "parent", "max_model_len")
            ],
            "metrics": [name in metrics for name in METRICS],
            "tokenize": type(
                (
                    await client.post("/tokenize", json={"prompt": "a", **_of(chat)})
                ).json()["tokens"]
            ).__name__,
            "chat": await _shape(client, "/v1/chat/completions", {**chat, **extra}),
            "whole": await _whole(
                client,
                "/v1/chat/completions",
                {**chat, "stream": False, "temperature": 0},
            ),
            "whole text": await _whole(
                client, "/v1/completions", {**text, "stream": False, "temperature": 0}
            ),
            "uncounted": await _uncounted(client, {**chat, "temperature": 0}),
            "detokenize": list(
                (
                    await client.post(
                        "/detokenize", json={"tokens": [1, 2], **_of(chat)}
                    )
                ).json()
            ),
            "completions": await _shape(client, "/v1/completions", {**text, **extra}),
            "usual": [
                await _usual(client, path, {**body, **extra, "max_tokens": 16, **ids})
                for path, body in (
                    ("/v1/chat/completions", chat),
                    ("/v1/completions", text),
                )
                for ids in ({}, {"return_token_ids": True})
            ],
            "plain": [
                await _plain(
                    client,
                    path,
                    {**body, **extra, "max_tokens": 16, "return_token_ids": True},
                )
                for path, body in (
                    ("/v1/chat/completions", chat),
                    ("/v1/completions", text),
                )
            ],
            "named": [
                await _named(
                    client,
                    path,
                    {**_of(chat), **body, "temperature": 0, "stream": stream},
                )
                for path, body in NAMED.items()
                for stream in (True, False)
            ],
            "counted": list(
                (
                    await client.post(
                        f"{MESSAGES}/count_tokens", json={**_of(chat), **STORY}
                    )
                ).json()
            ),
            "thinks": await EngineProbe(client, url, key).takes_thinking(
                model["id"], 60
            ),
            "refused": [
                await _refusal(client, path, {**_of(chat), **body, limit: -1})
                for (path, body), limit in zip(
                    NAMED.items(), ("max_tokens", "max_output_tokens"), strict=True
                )
            ],
            "held back": [
                await _held_back(
                    client,
                    path,
                    {
                        **body,
                        **extra,
                        "max_tokens": 32,
                        "ignore_eos": False,
                        "return_token_ids": True,
                    },
                )
                for path, body in (
                    ("/v1/chat/completions", chat),
                    ("/v1/completions", text),
                )
            ],
        }


def _of(body: dict[str, Any]) -> dict[str, Any]:
    return {"model": body["model"]}


async def _shape(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> dict[str, Any]:
    answer = (await client.post(path, json=body)).text
    lines = [line for line in answer.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    chunks = [json.loads(line[6:]) for line in lines[:-1]]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    return {
        "last": lines[-1],
        "finish": choices[-1]["finish_reason"],
        "text_in": "delta" if "delta" in choices[0] else "text",
        "usage_last": sorted(
            chunks[-1]["usage"].keys()
            & {"prompt_tokens", "completion_tokens", "total_tokens"}
        ),
        "usage_earlier": any(chunk.get("usage") for chunk in chunks[:-1]),
        "choices_with_usage": chunks[-1]["choices"],
        "tokens": chunks[-1]["usage"]["completion_tokens"],
    }


async def _named(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    """Return the members of an answer, or of a stream's events by kind and in order, of an API with named events.

    Check that each event is written as the router passes it on unchanged.
    """
    answer = await client.post(path, json=body)
    if not body["stream"]:
        return _members(answer.json())
    events = answer.text.split("\n\n")[:-1]
    usual = {MESSAGES: MESSAGE_FORMAT, RESPONSES: RESPONSE_FORMAT}[path].usual.fullmatch
    seen: list[Any] = []
    for event in events:
        name, data = (line.partition(": ")[2] for line in event.split("\n"))
        members = _members(json.loads(data))
        assert members["type"] == name
        assert usual(event.encode()), event
        if (name, members) not in seen:
            seen.append((name, members))
    return seen


def _members(value: Any) -> Any:
    """Return an answer with types in place of values, but for those that name its kind, and with one item of each list."""
    if isinstance(value, dict):
        named = {"type", "object", "role", "status", "stop_reason", "reason"}
        # The router reads nothing of the details.
        details = {"input_tokens_details", "output_tokens_details"}
        members = {}
        for name, member in value.items():
            if name in named:
                members[name] = member
            elif name in details and member:
                members[name] = {}
            else:
                members[name] = _members(member)
        return members
    if isinstance(value, list):
        return [_members(item) for item in value[:1]]
    return type(value).__name__


async def _refusal(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> tuple[int, bool]:
    answer = await client.post(path, json=body)
    return answer.status_code, isinstance(answer.json()["error"]["message"], str)


async def _usual(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> bool:
    """Tell whether every event is written as the router passes it on unchanged."""
    *events, done = (
        (await client.post(path, json=body))
        .content.removesuffix(b"\n\n")
        .split(b"\n\n")
    )
    return done == COMPLETION_FORMAT.done and all(
        map(COMPLETION_FORMAT.usual.fullmatch, events)
    )


async def _plain(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> bool:
    """Tell whether tokens of plain text are written as the router recognizes them, if there are any."""
    stream = (await client.post(path, json=body)).content
    events = [event for event in stream.split(b"\n\n") if event.startswith(b"data: {")]
    plain_events = [event for event in events if _holds_plain_text(parse_event(event))]
    return len(plain_events) > 0 and all(map(read_plain_token, plain_events))


def _holds_plain_text(chunk: Chunk) -> bool:
    """Tell whether a chunk is one token of text that JSON writes as it is, and nothing else."""
    is_one_token = len(chunk.token_ids) == 1 and chunk.finish_reason is None
    is_written_as_it_is = json.dumps(chunk.text) == f'"{chunk.text}"' and chunk.text
    return is_one_token and not chunk.prompt_ids and bool(is_written_as_it_is)


# No model ends its answer to this within three tokens.
STORY = {"messages": [{"role": "user", "content": "Tell me a long story about a fox."}]}
NAMED: dict[str, dict[str, Any]] = {
    MESSAGES: {**STORY, "max_tokens": 3},
    RESPONSES: {"input": STORY["messages"], "max_output_tokens": 3},
}
NEVER = "~~~~~~"  # No answer has this text.
# A real engine must answer so; the fake has an answer of its own.
SENTENCE = {
    "structured_outputs": {
        "choice": [
            "The fox ran over the hill, and the hounds ran after it until the evening."
        ]
    }
}
# A real engine must answer so; the fake does.
STOPS = {"stop": "e", "structured_outputs": {"choice": ["There it is."]}}


async def _held_back(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> dict[str, Any]:
    """Return how text and tokens go together, with a stop string and without, because broken answers are continued by it."""
    return {
        "kept back without a stop string": await _kept_back(
            client, path, {**body, **SENTENCE}
        ),
        "kept back with one": await _kept_back(
            client, path, {**body, **SENTENCE, "stop": NEVER}
        ),
        "kept back where it belongs to the answer": await _kept_back(
            client,
            path,
            {**body, **SENTENCE, "stop": NEVER, "include_stop_str_in_output": True},
        ),
        "stopped": await _stopped(
            client, path, {**body, **STOPS, "stream": False, "stream_options": None}
        ),
    }


async def _stopped(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> tuple[bool, str]:
    """Tell whether an answer holds its stop string, and what it says ended it."""
    choice = (await client.post(path, json=body)).json()["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return body["stop"] in text, choice["finish_reason"]


async def _kept_back(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> list[int]:
    """Return how many characters of its tokens' text were kept back after each event with text, but for the last.

    It is -1 where the text so far is not the beginning of the tokens' text.
    """
    answer = (await client.post(path, json=body)).text
    lines = [line for line in answer.split("\n") if line.startswith("data: {")]
    chunks = [json.loads(line[6:]) for line in lines]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    text = ""
    ids = list[int]()
    kept = list[int]()
    for choice in choices:
        more = (
            choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        )
        text += more
        ids += choice.get("token_ids") or []
        if not more or choice["finish_reason"] is not None:
            continue
        detokenized = await client.post(
            "/detokenize", json={"tokens": ids, **_of(body)}
        )
        shown = detokenized.json()["prompt"]
        kept.append(len(shown) - len(text) if shown.startswith(text) else -1)
    assert kept
    return sorted(set(kept))


async def _whole(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> dict[str, Any]:
    answer = (await client.post(path, json=body)).json()
    choice = answer["choices"][0]
    return {
        "finish": choice["finish_reason"],
        "text_in": "message"
        if isinstance(choice.get("message", {}).get("content"), str)
        else "text",
        "usage": {
            name: answer["usage"][name] > 0
            for name in ("prompt_tokens", "completion_tokens", "total_tokens")
        },
        "fingerprint": type(answer["system_fingerprint"]).__name__,
    }


async def _uncounted(client: httpx.AsyncClient, body: dict[str, Any]) -> list[bool]:
    lines = [
        line
        for line in (await client.post("/v1/chat/completions", json=body)).text.split(
            "\n"
        )
        if line
    ]
    return [
        bool('"choices":[{' in line and '"system_fingerprint":"' in line)
        for line in lines
    ][-3:]


@pytest.mark.parametrize("tier", ["fast"])
def test_fake_and_real_engine_look_alike(
    up: Up, tier: str, engine_keys: dict[str, str]
) -> None:
    """Health, model card, gauges, tokens, and both streams have the same shape on both."""

    async def both() -> tuple[dict[str, Any], dict[str, Any]]:
        async with serving(FakeEngine().app) as fake:
            return await script(fake, ""), await script(
                up.replica(tier)["url"], engine_keys[tier]
            )

    fake, real = asyncio.run(both())
    assert fake == real
    assert all((*real["usual"], *real["plain"])), "these take the fast way"


@pytest.mark.parametrize("tier", ["fast", "balanced", "precise"])
def test_an_engine_names_its_checkpoint(
    up: Up, tier: str, engine_keys: dict[str, str]
) -> None:
    """An engine names its checkpoint, and its process is found by its port: so an engine given by URL can be examined."""
    url = up.replica(tier)["url"]

    async def root() -> str | None:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            return (await EngineProbe(client, url, engine_keys[tier]).model()).root

    named = asyncio.run(root())
    shown = up.tiers()[tier]
    assert named == shown["checkpoint"]
    assert (
        root_precision(url, named) == shown["precision"] == PRECISIONS[TierName(tier)]
    )


def test_the_speed_of_an_engine_elsewhere_is_measured_while_it_is_idle(
    up: Up, engine_keys: dict[str, str]
) -> None:
    """While its gauges show no request, and its counters only the measurement's tokens, its speed is measured."""
    url = up.replica("precise")["url"]
    key = engine_keys["precise"]
    spec = TierSpec(
        TierName.PRECISE, 2048, max_num_seqs=16, max_in_flight=32, urls=(url,)
    )
    fleet = Fleet((spec,))

    async def measured() -> SpeedModel | None:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            probe = EngineProbe(client, url, key)
            replica = fleet.add(
                Replica(
                    "precise-0",
                    spec,
                    url=url,
                    api_key=key,
                    model=(await probe.model()).name,
                )
            )
            idle = IdleSpeed(fleet, WarmupPlan(), lambda _: probe)
            # The router that started the engine measures it too, which disturbs this measurement.
            for _ in range(30):
                if (speed := await idle.measure(replica)) is not None:
                    return speed
                await asyncio.sleep(2)
            return None

    assert asyncio.run(measured()) is not None


@pytest.mark.parametrize("tier", ["fast", "balanced", "precise"])
def test_log_probabilities_of_given_and_of_generated_tokens(
    up: Up, tier: str, engine_keys: dict[str, str]
) -> None:
    """Each token but the first has a score, and as many are generated as asked for; the fake does the same."""

    async def scored(url: str, key: str, count: int) -> tuple[int, int, int]:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            probe = EngineProbe(client, url, key)
            model = (await probe.model()).name
            token_ids = await probe.text_tokens(model, "One, two, three")
            given = await probe.prompt_logprobs(model, token_ids, 60)
            generated, logprobs = await probe.continuation(
                model, token_ids, count, timeout_s=60
            )
            assert all(logprob <= 0 for logprob in (*given, *logprobs))
            return len(given) - len(token_ids), len(generated), len(logprobs)

    async def both() -> list[tuple[int, int, int]]:
        async with serving(FakeEngine().app) as fake:
            return [
                await scored(fake, "", 5),
                await scored(up.replica(tier)["url"], engine_keys[tier], 5),
            ]

    assert asyncio.run(both()) == [(-1, 5, 5)] * 2
