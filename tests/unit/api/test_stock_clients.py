"""What clients that know nothing of this router send: upgrades, coded bodies, keys in several headers, pages of elsewhere."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import zstandard

from router.auth.api_keys import add_key
from router.section import SettingsError
from router.settings import load_settings
from tests.fakes.engine import ANSWER, Behaviour
from tests.unit.router_stack import router_stack
from tiers.spec import TierName

pytestmark = pytest.mark.anyio
HI = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"prompt": "hi", "stream": False},
    "/route": {"prompt": "hi"},
    CHAT: {"messages": HI},
    COMPLETIONS: {"prompt": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 9},
    "/v1/responses": {"input": "hi"},
    "/v1/messages/count_tokens": {"messages": HI},
    "/tokenize": {"prompt": "hi"},
}
PAGE = "https://chat.example.com"
RAW = zlib.compressobj(wbits=-zlib.MAX_WBITS)


@pytest.mark.parametrize("upgrade", ["h2c", "websocket", "TLS/1.2, h2c"])
@pytest.mark.parametrize("chunked", [False, True])
async def test_an_upgrade_is_ignored_and_the_body_read(
    tmp_path: Path, upgrade: str, *, chunked: bool
) -> None:
    """RFC 9110, section 7.8; also if it comes byte by byte or with the next request, and the connection is kept."""
    body = json.dumps(BODIES[CHAT]).encode()
    coded = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body
    length = "transfer-encoding: chunked" if chunked else f"content-length: {len(body)}"
    head = f"connection: Upgrade, HTTP2-Settings\r\nupgrade: {upgrade}\r\nhttp2-settings: AAE\r\nhost: localhost\r\n"
    sent = f"POST {CHAT} HTTP/1.1\r\n{head}{length}\r\n\r\n".encode() + coded
    plain = f"GET /healthz HTTP/1.1\r\n{head}\r\n".encode()
    async with router_stack(tmp_path) as stack:
        port = int(stack.url.rsplit(":", 1)[1])
        for size in (1, 50, len(sent) - len(coded), len(sent + plain)):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for start in range(0, len(sent + plain), size):
                writer.write((sent + plain)[start : start + size])
                await asyncio.sleep(0)
            async with asyncio.timeout(10):
                found = b""
                while b"alive" not in found:
                    found += await reader.readuntil(b"}")
            assert found.count(b"HTTP/1.1 200 OK") == 2
            assert "".join(ANSWER).encode() in found
            writer.close()
        assert all(
            asked["messages"] == HI for asked in stack.engines[TierName.FAST].requests
        )


@pytest.mark.parametrize("path", BODIES)
async def test_coded_bodies_are_read(tmp_path: Path, path: str) -> None:
    """Each coding, two at once, and a byte order mark before the body; the bound is that of what comes out."""
    plain = json.dumps(BODIES[path]).encode()
    zeros = bytes(1 << 28)
    coded = {
        ("gzip", 200): gzip.compress(plain),
        ("x-gzip", 200): gzip.compress(plain[:5]) + gzip.compress(plain[5:]),
        ("deflate", 200): zlib.compress(plain),
        ("Deflate", 200): (raw := RAW.copy()).compress(plain) + raw.flush(),
        ("zstd", 200): zstandard.compress(plain),
        ("gzip, zstd", 200): zstandard.compress(gzip.compress(plain)),
        ("identity", 200): b"\xef\xbb\xbf" + plain,
        ("gzip", 413): gzip.compress(zeros, 1),
        ("deflate", 413): zlib.compress(zeros, 1),
        ("zstd", 413): zstandard.compress(zeros),
        ("br", 415): plain,
        ("gzip", 415): gzip.compress(plain)[:-3],
        ("gzip, gzip, gzip", 415): gzip.compress(gzip.compress(gzip.compress(plain))),
        ("deflate", 415): zlib.compress(plain)[:-7],
        ("zstd", 415): zstandard.compress(plain)[:-3],
    }
    async with router_stack(tmp_path) as stack:
        for (coding, status), body in coded.items():
            answer = await stack.client.post(
                stack.url + path, content=body, headers={"content-encoding": coding}
            )
            assert answer.status_code == status, (coding, answer.text)
            assert (
                status != 415
                or answer.headers["accept-encoding"] == "gzip, deflate, zstd"
            )


async def test_a_key_comes_in_any_header_to_every_endpoint(tmp_path: Path) -> None:
    """As OpenAI's, Anthropic's and Azure's clients send it; twice the same is one, two are refused."""
    (key, _) = add_key(tmp_path / "keys.json", "ci", tiers=("fast",))
    (other, _) = add_key(tmp_path / "keys.json", "b")
    settings = {"auth": {"keys_file": str(tmp_path / "keys.json")}}
    async with router_stack(tmp_path, settings) as stack:
        ask = stack.client.request
        asked = [
            *(("POST", path, body) for path, body in BODIES.items()),
            ("GET", "/v1/models/auto", None),
            ("GET", "/tiers", None),
        ]
        for method, path, body in asked:
            bearer = {"authorization": f"bearer {key}"}
            theirs = {"x-api-key": key}
            azures = {"api-key": key}
            for headers in (bearer, theirs, azures, {**bearer, **theirs}):
                answer = await ask(method, stack.url + path, json=body, headers=headers)
                assert answer.status_code == 200, (path, answer.text)
            assert ("request-id" in answer.headers) is path.startswith("/v1/messages")
            for headers in (
                {},
                {**bearer, "x-api-key": other},
                {"authorization": "Basic eA=="},
            ):
                answer = await ask(method, stack.url + path, json=body, headers=headers)
                assert answer.status_code == 401
                assert (key in answer.text) is False
        listed = (
            await stack.client.get(f"{stack.url}/v1/models", headers={"x-api-key": key})
        ).json()["data"]
        assert {card["id"]: card["tiers"] for card in listed} == {
            name: ["fast"] for name in ("auto", "qarr", "fast")
        }
        lost = await stack.client.get(
            f"{stack.url}/v1/models/precise", headers={"x-api-key": key}
        )
        assert lost.status_code == 404
        assert ("precise" in lost.json()["error"]["message"].partition(":")[2]) is False


@pytest.mark.parametrize("keys", [False, True])
async def test_pages_of_allowed_origins_may_ask(tmp_path: Path, *, keys: bool) -> None:
    key = add_key(tmp_path / "keys.json", "ci")[0] if keys else ""
    settings = {
        "auth": {"keys_file": str(tmp_path / "keys.json")},
        "server": {"cors_origins": [PAGE]},
    }
    async with router_stack(tmp_path, settings) as stack:
        wish = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,x-qarr-tier",
        }
        for path in BODIES:
            asked = await stack.client.options(
                stack.url + path, headers={"origin": PAGE, **wish}
            )
            assert asked.status_code == 200
            assert asked.headers["access-control-allow-origin"] == PAGE
            assert (
                asked.headers["access-control-allow-headers"]
                == wish["access-control-request-headers"]
            )
            asked = await stack.client.options(
                stack.url + path, headers={"origin": "https://else.where", **wish}
            )
            assert asked.status_code == 400
            assert ("access-control-allow-origin" in asked.headers) is False
        for body in (BODIES[CHAT], BODIES[CHAT] | {"stream": True}, {"model": "none"}):
            headers = {"origin": PAGE, "sec-fetch-site": "cross-site", "x-api-key": key}
            answer = await stack.client.post(
                stack.url + CHAT, json=body, headers=headers
            )
            assert answer.status_code == (404 if "model" in body else 200)
            assert answer.headers["access-control-allow-origin"] == PAGE
            assert answer.headers["access-control-expose-headers"] == "*"
        headers = {"origin": "https://else.where", "sec-fetch-site": "cross-site"}
        answer = await stack.client.post(
            stack.url + CHAT, json=BODIES[CHAT], headers=headers
        )
        assert answer.status_code == (401 if keys else 403)


@pytest.mark.parametrize(
    "origin", ["https://a.example/", "a.example", "https://a.example/path", "null", ""]
)
def test_an_origin_is_a_scheme_and_a_host(origin: str) -> None:
    with pytest.raises(SettingsError, match=r"server\.cors_origins\.0"):
        load_settings(None, {"server": {"cors_origins": [origin]}})


@pytest.mark.parametrize(
    ("path", "body", "limit"),
    [
        ("/generate", {"prompt": "ab " * 3990, "stream": False}, 40),
        (CHAT, {"messages": [{"role": "user", "content": "ab " * 3990}]}, None),
        ("/v1/responses", {"input": "ab " * 3990}, None),
        (COMPLETIONS, {"prompt": list(range(4080))}, None),
        (COMPLETIONS, {"prompt": list(range(4095)), "max_tokens": 0, "echo": True}, 0),
    ],
)
async def test_an_answer_without_a_limit_ends_with_the_context(
    tmp_path: Path, path: str, body: dict[str, Any], limit: int | None
) -> None:
    """Such a request is refused only when the prompt alone is too long; what the caller did not send is not sent."""
    tiers = {name: {"max_model_len": 4096} for name in ("fast", "balanced", "precise")}
    async with router_stack(
        tmp_path, {"tiers": tiers}, fast=Behaviour(max_model_len=4096)
    ) as stack:
        answer = await stack.client.post(
            stack.url + path,
            json={"model": "auto", **body} if path[:2] == "/v" else body,
        )
        assert answer.status_code == 200, answer.text
        sent = stack.engines[TierName(answer.headers["x-qarr-tier"])].requests[-1]
        asked = sent.get("max_tokens", sent.get("max_output_tokens"))
        assert asked is limit if path != "/generate" else 1 <= asked < 256
        field = next(iter(body))
        longer = (
            list(range(4096))
            if path == COMPLETIONS
            else [{"role": "user", "content": "ab " * 4200}]
        )
        longer = {field: "ab " * 4200 if path == "/generate" else longer}
        refused = await stack.client.post(stack.url + path, json={**body, **longer})
        assert refused.status_code == (422 if path == "/generate" else 400)
        told = refused.json()
        assert "This model's maximum context length is 4096 tokens" in json.dumps(told)
        assert "template" not in json.dumps(told)
        assert path == "/generate" or told["error"]["code"] == "context_length_exceeded"
