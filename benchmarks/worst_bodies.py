"""What one request of a megabyte costs everybody else: the longest wait of another client while it is read and decided.

usage: python benchmarks/worst_bodies.py MODEL_FOLDER [--rounds 5]

MODEL_FOLDER holds the tokenizer.json by which tokens are counted. The router is alone on core 0. While each body is sent and
answered, another client asks for /healthz again and again on a connection of its own; shown is the longest of its waits, of
so many rounds the least, since the machine adds to it and never takes away. The first row is without any large body.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import httpx
from measure import free_port, process, stub, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE = 1_000_000
TEXTS = {
    "spaces": " " * SIZE,
    "line breaks": "\n" * (SIZE // 2),  # two bytes each in JSON
    "one letter": "a" * SIZE,
    "letters": "".join(chr(97 + n * n * 7919 % 26) for n in range(SIZE)),
    "ideographs": "".join(chr(0x4E00 + n * 7919 % 20_000) for n in range(SIZE // 3)),
    "prose": "The capital of France is Paris, and tides come twice a day. "
    * (SIZE // 60),
    "code": "def f(x):\n    return [y for y in range(x)]\n" * (SIZE // 44),
}


def bodies() -> Iterator[tuple[str, str, bytes, dict[str, str]]]:
    """Yield a name, a path, a body and headers for each request."""
    many = [
        {"role": ("user", "assistant")[n % 2], "content": "a"} for n in range(27_001)
    ]
    for name, text in TEXTS.items():
        chat = {"messages": [{"role": "user", "content": text}]}
        yield (
            f"chat, {name}",
            "/v1/chat/completions",
            json.dumps(chat, ensure_ascii=False).encode(),
            {},
        )
    for how in ("oldest", "middle"):
        cut = {"x-qarr-truncate": how}
        for name, text in (("spaces", TEXTS["spaces"]), ("prose", TEXTS["prose"])):
            yield (
                f"completion, {name}, cut: {how}",
                "/v1/completions",
                json.dumps({"prompt": text}).encode(),
                cut,
            )
        yield (
            f"chat, 27,001 messages, cut: {how}",
            "/v1/chat/completions",
            json.dumps({"messages": many}).encode(),
            cut,
        )
    yield (
        "messages, 27,001",
        "/v1/messages",
        json.dumps({"messages": many, "max_tokens": 9}).encode(),
        {},
    )
    yield (
        "responses, 27,001 items",
        "/v1/responses",
        json.dumps({"input": many}).encode(),
        {},
    )
    turns = [
        {"role": "user", "content": "a" * 900},
        {"role": "assistant", "content": "b" * 900},
    ] * 499
    whole = {"messages": [*turns, turns[0]], "stream": False}
    yield "generate, 999 messages", "/generate", json.dumps(whole).encode(), {}
    yield (
        "route, 999 messages",
        "/route",
        json.dumps({**whole, "truncate": "oldest"}).encode(),
        {},
    )
    strange = {"prompt": "a", **{f"k{n}": 1 for n in range(80_000)}}
    yield (
        "generate, 80,000 unknown fields",
        "/generate",
        json.dumps(strange).encode(),
        {},
    )
    strange = {
        "messages": [{"role": "user", "content": "a"}],
        "qarr": {f"k{n}": 1 for n in range(80_000)},
    }
    yield (
        "chat, 80,000 unknown options",
        "/v1/chat/completions",
        json.dumps(strange).encode(),
        {},
    )
    yield (
        "embeddings, 100,000 texts",
        "/v1/embeddings",
        json.dumps({"input": ["abcd"] * 100_000}).encode(),
        {},
    )
    yield (
        "tokenize, spaces",
        "/tokenize",
        json.dumps({"prompt": TEXTS["spaces"]}).encode(),
        {},
    )
    yield "no JSON", "/v1/chat/completions", b'{"messages":' + b"[" * 900_000, {}


async def wait_beside(
    url: str, path: str, body: bytes, headers: dict[str, str]
) -> float:
    """Return the longest wait of another client while a request is answered, in milliseconds."""
    async with (
        httpx.AsyncClient(trust_env=False, timeout=60) as other,
        httpx.AsyncClient(trust_env=False) as client,
    ):
        await other.get(f"{url}/healthz")
        asked = asyncio.create_task(
            client.post(url + path, content=body, headers=headers, timeout=60)
        )
        worst = 0.0
        while not asked.done():
            began = time.perf_counter()
            await other.get(f"{url}/healthz")
            worst = max(worst, time.perf_counter() - began)
        with suppress(httpx.HTTPError):
            await asked
        return worst * 1000


async def main() -> None:
    """Run the router and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_folder")
    parser.add_argument("--rounds", type=int, default=5)
    given, port = parser.parse_args(), free_port()
    url = f"http://127.0.0.1:{port}"
    with stub() as (engine, _):
        command = [".venv/bin/qarr", "serve", "--precise", engine, "--port", str(port)]
        with process([*command, "--tokenizer", given.model_folder], 0):
            wait_for(port, "/readyz")
            rows = [("none", "/healthz", b"", {}), *bodies()]
            print(f"{'body of about 1 MB':42} longest wait of others, ms")
            for name, path, body, headers in rows:
                found = [
                    await wait_beside(url, path, body, headers)
                    for _ in range(given.rounds)
                ]
                print(f"{name:42} {min(found):6.1f}", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
