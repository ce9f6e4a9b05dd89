"""Requests that nobody would send, made from a seed: the same seed makes the same requests."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

CHAT = {
    "model": "auto",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 3,
    "temperature": 0,
}
GENERATE = {
    "prompt": "What is the capital of France?",
    "system_prompt": "be brief",
    "max_tokens": 5,
    "temperature": 0.5,
    "stream": True,
    "tier": "fast",
    "tier_policy": "prefer",
    "priority": "batch",
    "sla": {"ttft_ms": 1e6, "tpot_ms": 1e6, "max_quality_loss": 0.9, "confidence": 0.9},
}
BODIES: dict[str, list[dict[str, Any]]] = {
    "/generate": [
        GENERATE,
        {"prompt": "hi"},
        {**GENERATE, "stream": False},
        {**GENERATE, "resumable": True},
    ],
    "/route": [GENERATE, {"prompt": "def f(): pass"}],
    "/v1/chat/completions": [
        CHAT,
        {
            **CHAT,
            "stream": True,
            "stream_options": {"include_usage": True},
            "n": 1,
            "qarr": {"report": True},
        },
        {
            **CHAT,
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {}}}
            ],
            "tool_choice": "auto",
        },
    ],
    "/v1/completions": [
        {"model": "auto", "prompt": "hi", "max_tokens": 4},
        {"prompt": ["a", "b"], "stream": True},
        {"prompt": [1, 2, 3]},
    ],
    "/v1/embeddings": [{"model": "auto", "input": ["a", "b"]}],
    "/tokenize": [
        {"prompt": "one two"},
        {"messages": [{"role": "user", "content": "hi"}]},
    ],
    "/detokenize": [{"tokens": [1, 2, 3]}],
}
RAW_VALUES = [
    "null", "true", "-1", "0", "-0", "1.5", "1e308", "1e400", "-1e400", "NaN", "Infinity", "-Infinity",
    str(2**31), str(2**63), str(-(2**63) - 1), str(2**64), "9" * 400, "1" + "0" * 5000, "0.1e-400", "01", "+1", "1.", ".5",
    '""', '"0"', '"\\ud800"', '"\\udc00\\ud800"', '"\\u0000"', '"\\uffff"', '"\U0001f600"', '"\u202e\u200b\ufeff"',
    '"' + "a" * 17_000 + '"', '"' + "a " * 9_000 + '"', '"' + "\U0001f600" * 5_000 + '"', '"\\x"', '"\t"',
    "[]", "{}", "[[]]", '{"a": {}}', "[null]", "[" * 60 + "]" * 60, "[" * 20_000, '{"a":' * 3_000 + "1" + "}" * 3_000,
    '{"__proto__": 1}', '{"": ""}', '["a", 1, null, {"b": []}]', "{", "]", "'a'", "/* */ 1", "undefined",
]  # fmt: skip
HEADER_VALUES = [
    b"", b" ", b"x" * 2_000, b"x" * 40_000, b"\xff\xfe", b"caf\xe9", b"0", b"-1", b"NaN", b"1e999", b"fast", b"\tfast\t",
    b"a,b,c", b'"quoted"', b"Bearer", b"Bearer x", b"Basic eDp4", b"null", b"../../etc/passwd", b"%00", b"a.1", b"x.0", b"1",
    b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01", b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-00", b"identity", b"gzip",
]  # fmt: skip
HEADER_NAMES = [
    b"content-type", b"accept", b"accept-encoding", b"content-encoding", b"authorization", b"x-request-id", b"traceparent",
    b"tracestate", b"x-qarr-tier", b"x-qarr-tier-policy", b"x-qarr-priority", b"x-qarr-sla-ttft-ms", b"last-event-id",
    b"x-qarr-sla-max-quality-loss", b"x-qarr-sla-confidence", b"host", b"connection", b"upgrade", b"expect", b"te", b"range",
    b"x-forwarded-for", b"x-http-method-override", b"cookie", b"trailer", b"if-none-match", b"x" * 300, b"content-length",
    b"transfer-encoding",
]  # fmt: skip
METHODS = [
    b"GET",
    b"POST",
    b"PUT",
    b"PATCH",
    b"DELETE",
    b"OPTIONS",
    b"HEAD",
    b"TRACE",
    b"PROPFIND",
]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A request as bytes, and how it is sent.

    Attributes:
        name: What was done to it.
        leaves: The client goes away without reading the answer.
        head_only: The answer has no body, whatever its headers say.
    """

    name: str
    data: bytes
    leaves: bool = False
    head_only: bool = False


def mutant(rng: random.Random, operations: list[tuple[str, str]]) -> Mutant:
    """Return a request to one of the operations (method, path) with one to three things done to it."""
    method, path = rng.choice(operations)
    bodies = BODIES.get(path)
    body = json.dumps(rng.choice(bodies)).encode() if bodies else b""
    headers: list[tuple[bytes, bytes]] = [
        (b"host", b"x"),
        (b"content-type", b"application/json"),
    ]
    verb, target = method.upper().encode(), path.replace("{id}", "auto").encode()
    done = []
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        kind = rng.choice(
            ("json", "json", "json", "bytes", "header", "target", "method")
        )
        if kind in {"json", "bytes"} and not body:
            kind = "header"
        if kind == "json":
            name, body = rng.choice(JSON_CHANGES)(rng, body)
        elif kind == "bytes":
            name, body = _bytes_changed(rng, body)
        elif kind == "header":
            header = (rng.choice(HEADER_NAMES), rng.choice(HEADER_VALUES))
            headers.append(header)
            name = f"header {header[0][:30].decode()}={header[1][:20]!r}"
        elif kind == "target":
            target = _target_changed(rng, target)
            name = f"target {target[:40]!r}"
        else:
            verb = rng.choice(METHODS)
            name = f"method {verb.decode()}"
        done.append(name)
    if body and not any(name == b"transfer-encoding" for name, _ in headers):
        body, framing = _framed(rng, body)
        headers.append(framing)
    rng.shuffle(headers)
    lines = [
        verb + b" " + target + b" HTTP/1.1",
        *(name + b": " + value for name, value in headers),
    ]
    data = b"\r\n".join(lines) + b"\r\n\r\n" + body
    leaves = rng.random() < 0.03
    return Mutant(
        f"{verb.decode()} {path}: {'; '.join(done) or 'as it is'}",
        data,
        leaves,
        verb == b"HEAD",
    )


def _framed(rng: random.Random, body: bytes) -> tuple[bytes, tuple[bytes, bytes]]:
    """Return a body with its length, or now and then in chunks."""
    if rng.random() > 0.15:
        return body, (b"content-length", str(len(body)).encode())
    chunks, at = [], 0
    while at < len(body):
        size = rng.choice((1, 7, 1000, len(body)))
        piece = body[at : at + size]
        chunks.append(b"%x\r\n" % len(piece) + piece + b"\r\n")
        # some of it is left out: it is chaos after all
        at += max(size, len(body) // 200)
    return b"".join(chunks) + b"0\r\n\r\n", (b"transfer-encoding", b"chunked")


def _bytes_changed(rng: random.Random, body: bytes) -> tuple[str, bytes]:
    at = rng.randrange(len(body) + 1)
    noise = bytes(rng.randrange(256) for _ in range(rng.choice((1, 4, 64))))
    changed = {
        "truncated": body[:at],
        "noise": body[:at] + noise + body[at:],
        "flipped": body[:at]
        + bytes(b ^ 1 << rng.randrange(8) for b in body[at : at + 3])
        + body[at + 3 :],
        "invalid UTF-8": body[:at]
        + rng.choice((b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80"))
        + body[at:],
        "NUL": body[:at] + b"\0" + body[at:],
        "BOM": b"\xef\xbb\xbf" + body,
        "UTF-16": body.decode("latin-1").encode("utf-16"),
        "trailing": body + rng.choice((b" ", b"\n{}", b"x", b"]")),
        "twice": body + body,
        "empty": b"",
        "too large": body + b" " * 300_000,
        "array": b"[" + body + b"]",
    }
    name = rng.choice(list(changed))
    return name, changed[name]


def _target_changed(rng: random.Random, target: bytes) -> bytes:
    return rng.choice(
        (
            target + b"?a=1&a=2&" + b"q" * rng.choice((1, 3000)),
            target + b"/",
            b"/" + target,
            b"http://x" + target,
            target.replace(b"e", b"%65"),
            target + b"%00",
            target + b"%ff%fe",
            target + b"%",
            target + b"/../../healthz",
            target + b";v=1",
            target + b"#f",
            target.upper(),
            b"*",
            b"/v1/models/" + b"%2f" * 100,
            b"/" + b"a" * 20_000,
            b"/\xc3\xa9",
        )
    )


def _places(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path to every value in a JSON document but the document itself."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [
        place
        for key, inner in items
        for place in ((*path, key), *_places(inner, (*path, key)))
    ]


def _at(document: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        document = document[key]
    return document


def _parsed(body: bytes) -> Any:
    """Return a body as a document; one that was spoilt already begins anew."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    return (
        document if isinstance(document, dict) and document else copy.deepcopy(GENERATE)
    )


def _replaced(rng: random.Random, body: bytes) -> tuple[str, bytes]:
    document = _parsed(body)
    place = rng.choice(_places(document))
    raw = rng.choice(RAW_VALUES)
    _at(document, place[:-1])[place[-1]] = "@@"
    return f"{place}={raw[:20]}", json.dumps(document).replace('"@@"', raw).encode(
        "utf-8", "surrogatepass"
    )


def _removed(rng: random.Random, body: bytes) -> tuple[str, bytes]:
    document = _parsed(body)
    place = rng.choice(_places(document))
    del _at(document, place[:-1])[place[-1]]
    return f"without {place}", json.dumps(document).encode()


def _added(rng: random.Random, body: bytes) -> tuple[str, bytes]:
    name = rng.choice(
        (
            "model",
            "n",
            "stream",
            "max_tokens",
            "stop",
            "logprobs",
            "qarr",
            "wat",
            "",
            "a" * 500,
            "priority",
        )
    )
    raw = rng.choice(RAW_VALUES)
    text = json.dumps(_parsed(body))
    return f"with {name[:20]}={raw[:20]}", (
        text[:-1] + f", {json.dumps(name)}: {raw}}}"
    ).encode("utf-8", "surrogatepass")


def _repeated(rng: random.Random, body: bytes) -> tuple[str, bytes]:
    document = _parsed(body)
    name = rng.choice(list(document))
    raw = rng.choice(RAW_VALUES)
    text = json.dumps(document)
    at_front = rng.random() < 0.5
    member = f"{json.dumps(name)}: {raw}"
    changed = (
        "{" + member + ", " + text[1:] if at_front else text[:-1] + ", " + member + "}"
    )
    return f"{name} twice", changed.encode("utf-8", "surrogatepass")


def _many(rng: random.Random, body: bytes) -> tuple[str, bytes]:
    document = _parsed(body)
    count = rng.choice((100, 5_000))
    return f"{count} members", json.dumps(
        {**document, **{f"k{n}": n for n in range(count)}}
    ).encode()


JSON_CHANGES: tuple[Callable[[random.Random, bytes], tuple[str, bytes]], ...] = (
    _replaced,
    _replaced,
    _replaced,
    _removed,
    _added,
    _repeated,
    _many,
)
