"""Ask an engine about itself. The only file that knows vLLM's paths, fields and metric names."""

from __future__ import annotations

import asyncio
import json
import re
import time
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

import httpx

from tiers.errors import ProbeError, RefusedError
from tiers.fleet import Gauges

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# vLLM 0.32; older releases call the last one gpu_cache_usage_perc.
_GAUGE = re.compile(
    r"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc|gpu_cache_usage_perc)(?:\{[^}]*\})? (\S+)$",
    re.MULTILINE,
)
# Counters, with their label sets added up. The cache's are in tokens.
_COUNTER = re.compile(
    r"^vllm:(prompt_tokens_total|generation_tokens_total|time_to_first_token_seconds_sum|time_to_first_token_seconds_count"
    r"|prefix_cache_hits_total|prefix_cache_queries_total)(?:\{[^}]*\})? (\S+)$",
    re.MULTILINE,
)
_KV_TOKENS = re.compile(r'^vllm:cache_config_info\{[^}]*kv_cache_size_tokens="(\d+)"', re.MULTILINE)
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Generation:
    """One timed generation. Times in milliseconds; ``tpot_ms`` is None for fewer than two tokens."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    ttft_ms: float
    tpot_ms: float | None
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True)
class Counters:
    """What an engine has counted since it started; 0 where it does not count that.

    Attributes:
        prompt_tokens: Of prompts that it has answered.
        output_tokens: Generated.
        ttft_s: All times to a first token together, in seconds.
        first_tokens: How many those are.
        cache_hits: Prompt tokens found in the prefix cache.
        cache_queries: Prompt tokens looked up in it.
    """

    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    ttft_s: float = 0.0
    first_tokens: float = 0.0
    cache_hits: float = 0.0
    cache_queries: float = 0.0

    def since(self, earlier: Counters) -> Counters:
        """Return what was counted since an earlier reading."""
        pairs = zip(astuple(self), astuple(earlier), strict=True)
        return Counters(*(now - before for now, before in pairs))


@dataclass(frozen=True, slots=True)
class EngineProbe:
    """A client of one engine's probing surface.

    Attributes:
        client: Shared; its timeouts hold for the short calls.
        url: The engine's base URL.
        api_key: Sent as a bearer token.
    """

    client: httpx.AsyncClient
    url: str
    api_key: str

    async def alive(self) -> bool:
        """Tell whether ``/health`` answers 200. An alive engine need not be warm."""
        try:
            return (await self._get("/health")).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    async def readings(self) -> tuple[Gauges, Counters]:
        """Read running, waiting and KV-cache use, and what the engine has counted, from ``/metrics``.

        Raises:
            ProbeError: The engine does not answer, or without these metrics.
        """
        try:
            page = (await self._get("/metrics")).text
        except httpx.HTTPError as error:
            raise ProbeError(f"{self.url}/metrics: {type(error).__name__}") from error
        found = {name: float(value) for name, value in _GAUGE.findall(page)}
        usage = found.get("kv_cache_usage_perc", found.get("gpu_cache_usage_perc"))
        if usage is None or "num_requests_running" not in found:
            raise ProbeError(f"{self.url}/metrics has no vLLM gauges")
        counted: dict[str, float] = {}
        for name, value in _COUNTER.findall(page):
            counted[name] = counted.get(name, 0.0) + float(value)
        size = _KV_TOKENS.search(page)
        gauges = Gauges(
            running=int(found["num_requests_running"]),
            waiting=int(found.get("num_requests_waiting", 0)),
            kv_cache_usage=usage,
            kv_cache_tokens=int(size[1]) if size else None,
        )
        return gauges, Counters(
            prompt_tokens=counted.get("prompt_tokens_total", 0.0),
            output_tokens=counted.get("generation_tokens_total", 0.0),
            ttft_s=counted.get("time_to_first_token_seconds_sum", 0.0),
            first_tokens=counted.get("time_to_first_token_seconds_count", 0.0),
            cache_hits=counted.get("prefix_cache_hits_total", 0.0),
            cache_queries=counted.get("prefix_cache_queries_total", 0.0),
        )

    async def model(self) -> tuple[str, int]:
        """Return the served model's name and its context length in tokens."""
        card = (await self._json("GET", "/v1/models", None))["data"][0]
        return str(card["id"]), int(card["max_model_len"])

    async def chat_tokens(self, model: str, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the ids of messages rendered through the engine's chat template."""
        answer = await self._json("POST", "/tokenize", {"model": model, "messages": list(messages)})
        return list(answer["tokens"])

    async def text_tokens(self, model: str, text: str) -> list[int]:
        """Return the ids of plain text, without special tokens."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        return list((await self._json("POST", "/tokenize", body))["tokens"])

    async def greedy_tokens(
        self, model: str, prompts: Sequence[str], count: int, timeout_s: float
    ) -> tuple[tuple[int, ...], ...]:
        """Return the ids of exactly ``count`` tokens with which the engine continues each text greedily, all in one batch.

        Raises:
            ProbeError: The engine does not answer in time, or without token ids.
        """
        body = {
            "model": model,
            "prompt": list(prompts),
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = await self._json("POST", COMPLETIONS, body, timeout_s)
        try:
            choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
            found = tuple(tuple(int(token) for token in choice["token_ids"]) for choice in choices)
        except (KeyError, TypeError) as error:
            raise ProbeError(f"{self.url}{COMPLETIONS} does not return token ids: it takes a newer vLLM") from error
        if len(found) != len(prompts):
            raise ProbeError(f"{self.url}{COMPLETIONS} answers {len(found)} of {len(prompts)} prompts")
        return found

    async def generate(self, path: str, body: Mapping[str, Any], timeout_s: float) -> Generation:
        """Stream one generation and time it.

        Raises:
            ProbeError: The engine refused, or took longer than ``timeout_s``.
        """
        request = {**body, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
        try:
            async with asyncio.timeout(timeout_s):
                return await self._stream(path, request)
        except TimeoutError as error:
            raise ProbeError(f"{self.url}{path}: no complete answer within {timeout_s:g} s") from error
        except httpx.HTTPError as error:
            raise ProbeError(f"{self.url}{path}: {type(error).__name__} {error}".rstrip()) from error

    async def _stream(self, path: str, body: Mapping[str, Any]) -> Generation:
        parts: list[str] = []
        usage: Mapping[str, int] = {}
        fingerprint: str | None = None
        started = time.monotonic()
        first = last = 0.0
        async with self.client.stream(
            "POST", f"{self.url}{path}", json=body, headers=self._headers(), timeout=None
        ) as response:
            if response.status_code != httpx.codes.OK:
                detail = (await response.aread()).decode(errors="replace")[:500]
                kind = RefusedError if response.status_code == httpx.codes.BAD_REQUEST else ProbeError
                raise kind(f"{self.url}{path}: HTTP {response.status_code}: {detail}")
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                usage = chunk.get("usage") or usage
                fingerprint = chunk.get("system_fingerprint") or fingerprint
                for choice in chunk.get("choices", ()):
                    text = choice["delta"].get("content") if "delta" in choice else choice.get("text")
                    if text:
                        last = time.monotonic()
                        first = first or last
                        parts.append(text)
        tokens = usage.get("completion_tokens", 0)
        tpot_ms = (last - first) * 1000 / (tokens - 1) if tokens > 1 else None
        ttft_ms = (first - started) * 1000
        return Generation("".join(parts), usage.get("prompt_tokens", 0), tokens, ttft_ms, tpot_ms, fingerprint)

    async def _get(self, path: str) -> httpx.Response:
        """Ask what is asked every second. httpx ties an answer to its stream and back, which only the collector undoes."""
        response = await self.client.get(f"{self.url}{path}")
        response.stream = httpx.ByteStream(b"")  # it is read
        return response

    async def _json(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float | None = None
    ) -> dict[str, Any]:
        limit = self.client.timeout if timeout_s is None else timeout_s
        try:
            response = await self.client.request(
                method, f"{self.url}{path}", json=body, headers=self._headers(), timeout=limit
            )
            response.raise_for_status()
            answer: dict[str, Any] = response.json()
        except (httpx.HTTPError, ValueError) as error:
            raise ProbeError(f"{self.url}{path}: {type(error).__name__} {error}") from error
        return answer

    def _headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
