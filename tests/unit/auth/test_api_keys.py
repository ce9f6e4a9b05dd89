"""Keys: made, kept, checked, revoked; and what they let a caller do."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.auth.access import KeyStore
from router.auth.api_keys import (
    KeysError,
    UnauthorizedError,
    add_key,
    read_keys,
    revoke_key,
)
from router.deployment.listening import ListenError, open_keys
from router.settings import load_settings
from tests.unit.router_stack import Stack, router_stack
from tiers.spec import TierName


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    return tmp_path / "keys" / "keys.json"


def test_keys_are_kept_as_hashes(keys_file: Path) -> None:
    """The file has the hash, not the key, and only its owner may read it."""
    key, record = add_key(keys_file, "ci")
    text = keys_file.read_text()
    assert key not in text
    assert key.removeprefix("qarr-") not in text
    assert record.sha256 in text
    assert keys_file.stat().st_mode & 0o777 == 0o600
    assert KeyStore(keys_file).find(key).name == "ci"


def test_wrong_and_revoked_keys_are_refused(keys_file: Path) -> None:
    """A key is refused unless it is in force; its record outlives it."""
    key, record = add_key(keys_file, "ci")
    for wrong in (key + "x", key[:-1], "", record.sha256, record.id):
        with pytest.raises(UnauthorizedError):
            KeyStore(keys_file).find(wrong)
    revoke_key(keys_file, "ci")
    store = KeyStore(keys_file)
    with pytest.raises(UnauthorizedError):
        store.find(key)
    assert store.required  # an emptied file opens nothing
    assert read_keys(keys_file)[0].revoked is not None


def test_a_running_store_sees_changes(
    keys_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys made and revoked later count without a restart; a file that breaks or goes away changes nothing."""
    monkeypatch.setattr("router.auth.access.RELOAD_S", 0.0)
    store = KeyStore(keys_file)
    assert not store.required
    key, _ = add_key(keys_file, "one")
    assert store.required
    assert store.find(key).name == "one"
    good = keys_file.read_bytes()
    keys_file.write_text("{")
    assert store.find(key).name == "one"
    assert ["key file" in note for note in store.notes] == [True]
    keys_file.unlink()
    assert store.required is True
    assert store.find(key).name == "one"
    keys_file.write_bytes(good)
    revoke_key(keys_file, "one")
    with pytest.raises(UnauthorizedError):
        store.find(key)
    assert store.notes == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "JSON"),
        ('{"version": 2}', "version"),
        ('{"keys": [{"id": "a"}]}', "keys.0.name"),
    ],
)
def test_a_broken_file_is_named(keys_file: Path, text: str, says: str) -> None:
    """A file that is not a key file is refused, with what is wrong in it."""
    keys_file.parent.mkdir()
    keys_file.write_text(text)
    with pytest.raises(KeysError, match=says):
        KeyStore(keys_file)


@pytest.mark.parametrize(
    "rights",
    [
        {"requests_per_minute": 0},
        {"tiers": ()},
        {"over": "maybe"},
        {"max_priority": "top"},
        {"name": ""},
    ],
)
def test_rights_are_checked(keys_file: Path, rights: dict[str, Any]) -> None:
    """A right that is not valid is refused and named; nothing is written."""
    name = rights.pop("name", "ci")
    with pytest.raises(KeysError):
        add_key(keys_file, name, **rights)
    assert not keys_file.exists()


@pytest.mark.parametrize(
    "host",
    [
        "",
        "[::1]",
        "0.0.0.0",
        "::",
        "10.1.2.3",
        "128.0.0.1",
        "::2",
        "LOCALHOST.example",
        "127.0.0.1.example",
        "127.1",
    ],
)
def test_no_keys_no_other_address(host: str, keys_file: Path) -> None:
    """Off loopback the router does not start without keys, unless told to in so many words."""
    auth = {"keys_file": str(keys_file)}
    with pytest.raises(ListenError, match="qarr keys add"):
        open_keys(load_settings(None, {"server": {"host": host}, "auth": auth}))
    open_keys(
        load_settings(
            None, {"server": {"host": host}, "auth": {**auth, "allow_keyless": True}}
        )
    )
    add_key(keys_file, "ci")
    assert open_keys(
        load_settings(None, {"server": {"host": host}, "auth": auth})
    ).required


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.255.255.254"])
def test_loopback_needs_no_keys(host: str, keys_file: Path) -> None:
    """On loopback there are no keys until some are made."""
    settings = load_settings(
        None, {"server": {"host": host}, "auth": {"keys_file": str(keys_file)}}
    )
    assert not open_keys(settings).required


async def ask(stack: Stack, key: str | None, **body: Any) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    body = {"model": "auto", "messages": [{"role": "user", "content": "hi"}], **body}
    return await stack.client.post(
        f"{stack.url}/v1/chat/completions", json=body, headers=headers
    )


@pytest.mark.anyio
async def test_requests_need_a_key(
    tmp_path: Path, keys_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a valid key every endpoint but the probes is a 401 in its own form; keys never reach engines or logs."""
    caplog.set_level(logging.DEBUG, "qarr")
    key, _ = add_key(keys_file, "ci")
    async with router_stack(tmp_path, {"auth": {"keys_file": str(keys_file)}}) as stack:
        for wrong in (None, "qarr-wrong", key + "x"):
            answer = await ask(stack, wrong)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        for path in (
            "/tiers",
            "/route",
            "/generate",
            "/v1/models",
            "/tokenize",
            "/nowhere",
        ):
            assert (await stack.client.get(stack.url + path)).status_code == 401, path
        ours = await stack.client.post(f"{stack.url}/generate", json={"prompt": "hi"})
        assert ours.json()["type"] == "urn:qarr:problem:unauthorized"
        for path in ("/healthz", "/readyz"):
            assert (await stack.client.get(stack.url + path)).status_code == 200
        assert (await ask(stack, key)).status_code == 200
        engine = stack.engines[TierName.FAST]
        assert key not in str(engine.headers)
        assert key not in str(engine.raw)
    assert key not in caplog.text
    assert "qarr-wrong" not in caplog.text


@pytest.mark.anyio
async def test_a_key_bounds_tiers_and_priority(tmp_path: Path, keys_file: Path) -> None:
    """What goes beyond a key is lowered and disclosed, or refused, as the key says."""
    rights = {"tiers": ("fast",), "max_priority": "standard"}
    soft, _ = add_key(keys_file, "soft", **rights)
    hard, _ = add_key(keys_file, "hard", over="refuse", **rights)
    async with router_stack(tmp_path, {"auth": {"keys_file": str(keys_file)}}) as stack:
        lowered = await ask(stack, soft, qarr={"tier": "precise"})
        assert lowered.headers["x-qarr-tier"] == "fast"
        assert (
            "hint precise not taken: is not allowed for this key"
            in lowered.headers["x-qarr-reason"]
        )
        code = await ask(
            stack,
            soft,
            messages=[{"role": "user", "content": "Write a Python function that adds"}],
        )
        assert code.headers["x-qarr-tier"] == "fast"
        assert "and this key allows no better tier" in code.headers["x-qarr-reason"]
        refused = await ask(stack, hard, model="precise")
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "beyond_key"
        assert refused.json()["error"]["param"] == "model"
        required = await ask(stack, soft, model="precise")
        assert required.status_code == 403
        assert required.json()["error"]["code"] == "not_allowed"
        engine = stack.engines[TierName.FAST]
        await ask(stack, soft, qarr={"priority": "interactive"})
        assert engine.requests[-1]["priority"] == 0
        await ask(stack, soft, priority=-100)
        assert engine.requests[-1]["priority"] == 0
        urgent = await ask(stack, hard, qarr={"priority": "interactive"})
        assert urgent.status_code == 403
        assert urgent.json()["error"]["param"] == "qarr.priority"
        # A tier that fails is not replaced by one that the key does not allow.
        engine.status = 500
        assert (await ask(stack, soft)).status_code == 503


@pytest.mark.anyio
async def test_a_key_over_its_quota_gets_429(tmp_path: Path, keys_file: Path) -> None:
    """Every answer's headers tell what is left of the minute; when it is used up, the answer is a 429 with Retry-After."""
    key, _ = add_key(keys_file, "ci", requests_per_minute=2)
    async with router_stack(tmp_path, {"auth": {"keys_file": str(keys_file)}}) as stack:
        first = await ask(stack, key)
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert (await ask(stack, key)).headers["x-ratelimit-remaining-requests"] == "0"
        over = await ask(stack, key)
        assert over.status_code == 429
        assert over.json()["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(over.headers["retry-after"]) <= 61
        assert over.headers["x-ratelimit-remaining-requests"] == "0"
        ours = await stack.client.post(
            f"{stack.url}/generate",
            json={"prompt": "hi"},
            headers={"authorization": f"Bearer {key}"},
        )
        assert ours.status_code == 429
        assert ours.json()["type"] == "urn:qarr:problem:over-quota"
        tokens = await stack.client.post(
            f"{stack.url}/tokenize",
            json={"prompt": "a"},
            headers={"authorization": f"Bearer {key}"},
        )
        assert tokens.status_code == 429


@pytest.mark.anyio
async def test_tokens_are_taken_in_advance_and_given_back(
    tmp_path: Path, keys_file: Path
) -> None:
    """A request takes prompt and max_tokens; what it did not use comes back, and a failed one takes nothing."""
    key, _ = add_key(keys_file, "ci", tokens_per_minute=500)
    async with router_stack(tmp_path, {"auth": {"keys_file": str(keys_file)}}) as stack:
        # 5 x 400 in advance, 17 used: 10 of the prompt and 7 of the answer
        for _ in range(5):
            answer = await ask(stack, key, max_tokens=400)
            assert answer.status_code == 200
        assert 500 - int(answer.headers["x-ratelimit-remaining-tokens"]) in range(
            4 * 17 + 400, 4 * 17 + 420
        )
        larger = await ask(stack, key, max_tokens=600)
        assert larger.status_code == 400
        assert larger.json()["error"]["code"] == "over_token_quota"
        over = await ask(stack, key, max_tokens=490)
        assert over.status_code == 429
        stack.engines[TierName.FAST].status = 400
        used = 5 * 17
        for _ in range(20):
            failed = await ask(stack, key, max_tokens=300)
            assert failed.status_code == 400
        stack.engines[TierName.FAST].status = 200
        last = await ask(stack, key, max_tokens=300)
        assert 500 - int(last.headers["x-ratelimit-remaining-tokens"]) in range(
            used + 300, used + 320
        )


@pytest.mark.anyio
async def test_places_are_given_back(tmp_path: Path, keys_file: Path) -> None:
    """With one request at once, the next is let in as soon as the previous one has ended, however it ended."""
    key, _ = add_key(keys_file, "ci", concurrent_requests=1)
    async with router_stack(tmp_path, {"auth": {"keys_file": str(keys_file)}}) as stack:
        engine = stack.engines[TierName.FAST]
        engine.delay_s = 0.2
        several = await asyncio.gather(*(ask(stack, key) for _ in range(3)))
        assert sorted(answer.status_code for answer in several) == [200, 429, 429]
        for fault in ("error_after", "break_after"):
            setattr(engine, fault, 2)
            engine.delay_s = 0.0
            await ask(stack, key, stream=True, model="fast")
            setattr(engine, fault, None)
            assert (await ask(stack, key)).status_code == 200


@pytest.mark.anyio
async def test_a_priority_is_bounded_however_it_is_written(
    tmp_path: Path, keys_file: Path
) -> None:
    """vLLM reads "-1000" and -1000.0 as numbers, so the bound holds for those; a request without a priority is never refused."""
    key, _ = add_key(keys_file, "low", max_priority="batch", over="refuse")
    soft, _ = add_key(keys_file, "soft", max_priority="standard")
    async with router_stack(tmp_path, {"auth": {"keys_file": str(keys_file)}}) as stack:
        engine = stack.engines[TierName.FAST]
        for written in ("-1000", -1000.0, -1000):
            assert (
                await ask(stack, key, model="fast", priority=written)
            ).status_code == 403
            assert (
                await ask(stack, soft, model="fast", priority=written)
            ).status_code == 200
            assert engine.requests[-1]["priority"] == 0
        assert (await ask(stack, key, model="fast")).status_code == 200
        assert engine.requests[-1]["priority"] == 1
        ours = {"authorization": f"Bearer {key}"}
        plain = await stack.client.post(
            f"{stack.url}/generate", json={"prompt": "hi", "tier": "fast"}, headers=ours
        )
        assert plain.status_code == 200


@pytest.mark.anyio
async def test_each_answer_takes_its_tokens(tmp_path: Path, keys_file: Path) -> None:
    """Several choices take the prompt once and ``max_tokens`` each; several prompts each take both."""
    key, _ = add_key(keys_file, "ci", tokens_per_minute=1000)
    headers = {"authorization": f"Bearer {key}"}
    async with router_stack(tmp_path, {"auth": {"keys_file": str(keys_file)}}) as stack:

        async def left(path: str, body: dict[str, Any]) -> int:
            url = f"{stack.url}/v1/{path}"
            answer = await stack.client.post(
                url, json={"model": "fast", **body}, headers=headers
            )
            return int(answer.headers["x-ratelimit-remaining-tokens"])

        full = await left("completions", {"prompt": [1, 2], "max_tokens": 10})
        assert full == 1000 - 12
        used = 17  # The fake engine reports so many tokens for that answer.
        assert (
            await left("completions", {"prompt": [1, 2], "max_tokens": 10, "n": 4})
            == 1000 - used - 42
        )
        assert (
            await left("completions", {"prompt": [[1, 2]] * 3, "max_tokens": 10})
            == 1000 - 2 * used - 36
        )
        denied = await stack.client.post(
            f"{stack.url}/v1/completions",
            json={"prompt": [[1, 2]] * 30, "max_tokens": 90},
            headers=headers,
        )
        assert denied.json()["error"]["code"] == "over_token_quota"


@pytest.mark.anyio
async def test_no_number_is_higher_than_the_highest_class(
    tmp_path: Path, keys_file: Path
) -> None:
    """A caller's own number is lowered to interactive, with a key or without: no request goes before all others."""
    key, _ = add_key(keys_file, "default")
    hard, _ = add_key(keys_file, "hard", over="refuse")
    async with router_stack(tmp_path) as keyless:
        engine = keyless.engines[TierName.FAST]
        for asked_for, sent in ((-2147483648, -1), (-2, -1), (-1, -1), (0, 0), (7, 7)):
            assert (
                await ask(keyless, None, model="fast", priority=asked_for)
            ).status_code == 200
            assert engine.requests[-1]["priority"] == sent
    (tmp_path / "more").mkdir()
    async with router_stack(
        tmp_path / "more", {"auth": {"keys_file": str(keys_file)}}
    ) as stack:
        engine = stack.engines[TierName.FAST]
        assert (await ask(stack, key, model="fast", priority=-5)).status_code == 200
        assert engine.requests[-1]["priority"] == -1
        assert (await ask(stack, hard, model="fast", priority=-1)).status_code == 200
        refused = await ask(stack, hard, model="fast", priority=-5)
        assert refused.status_code == 403
        assert refused.json()["error"]["param"] == "priority"


@pytest.mark.anyio
async def test_a_decision_counts_as_a_request(tmp_path: Path, keys_file: Path) -> None:
    """A /route that is answered takes one request of the quota and no tokens; one that is refused takes nothing."""
    key, _ = add_key(
        keys_file,
        "ci",
        requests_per_minute=3,
        tokens_per_minute=100,
        tiers=("fast",),
        over="refuse",
    )
    async with router_stack(tmp_path, {"auth": {"keys_file": str(keys_file)}}) as stack:
        ours = {"authorization": f"Bearer {key}"}

        async def route(**body: Any) -> httpx.Response:
            return await stack.client.post(
                f"{stack.url}/route", json={"prompt": "hi", **body}, headers=ours
            )

        assert (await route(tier="precise")).status_code == 403
        assert (await route(tier="none")).status_code == 400
        for left in (2, 1, 0):
            answer = await route()
            assert answer.status_code == 200
            assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
            assert answer.headers["x-ratelimit-remaining-tokens"] == "100"
        over = await route()
        assert over.status_code == 429
        assert over.json()["type"] == "urn:qarr:problem:over-quota"
        assert 1 <= int(over.headers["retry-after"]) <= 61
        assert (await ask(stack, key, max_tokens=10)).status_code == 429
