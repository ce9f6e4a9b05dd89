"""Ask an engine about itself. The only module that knows vLLM's paths, fields and metric names.

It also checks the answers: one that differs from vLLM's, is too long or too slow raises a ``ProbeError`` with the reason.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import defaultdict
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from operator import add, sub
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from tiers.errors import BusyError, NoScoresError, ProbeError, RefusedError
from tiers.snapshot import Gauges

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from tiers.spec import Adapter

# The names of vLLM 0.32. Older releases say gpu_cache_usage_perc for kv_cache_usage_perc.
_GAUGES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "gpu_cache_usage_perc",
)
# Each counter is summed over its label sets. Those of the prefix cache count tokens.
_COUNTERS = (
    "prompt_tokens_total",
    "generation_tokens_total",
    "time_to_first_token_seconds_sum",
    "time_to_first_token_seconds_count",
    "prefix_cache_hits_total",
    "prefix_cache_queries_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
)
_CACHE_CONFIG = "cache_config_info"
# Of a page's hundreds of lines few are read. The pattern begins with a line break because that is searched for ten times as
# fast as ^.
_METRIC = re.compile(
    rf"\nvllm:({'|'.join((*_GAUGES, *_COUNTERS, _CACHE_CONFIG))})(?:\{{(.*)\}})? (\S+)$",
    re.MULTILINE,
)
_KV_TOKENS = re.compile(r'kv_cache_size_tokens="(\d+)"')
_KV_BLOCK = re.compile(r'(?:^|,)block_size="(\d+)"', re.MULTILINE)
_CACHE_DTYPE = re.compile(r'(?:^|,)cache_dtype="([^"]+)"', re.MULTILINE)
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
# bounds a complete answer that is no generation: the client's own timeouts start over with every byte
ANSWER_S = 30.0
# Penalties of an engine's own generation_config.json would keep it from the likeliest tokens.
GREEDY = {
    "temperature": 0,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
}
# how a request ends that meets a server's close of an idle connection: uvicorn and httpx both keep them for 5 s
_CLOSED_ERRORS = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)
LOAD_S = 300.0  # bounds the time in which an adapter is loaded or unloaded
MAX_BYTES = 16 << 20  # longer answers are refused
_REFUSALS: Mapping[int, type[ProbeError]] = {
    httpx.codes.BAD_REQUEST: RefusedError,
    httpx.codes.TOO_MANY_REQUESTS: BusyError,
    httpx.codes.SERVICE_UNAVAILABLE: BusyError,
}
# With the value 1, in each answer of an engine that resumes answers, and in each request to resume one.
RESUME_HEADER = "x-qarr-resume"
SHOWN_CHARS = 500  # so much of an engine's answer is shown in an error


class ServedModel(NamedTuple):
    """What an engine serves.

    Attributes:
        name: Its name in requests.
        max_model_len: Its context, in tokens.
        root: Folder of the checkpoint on the engine's machine, or its id on the Hugging Face hub; None: not reported.
        adapters: Names of its LoRA adapters.
        resumes: Whether it resumes answers that another engine has begun (``tiers/engine_plugin``).
    """

    name: str
    max_model_len: int
    root: str | None
    adapters: tuple[str, ...] = ()
    resumes: bool = False


@dataclass(frozen=True, slots=True)
class Generation:
    """One timed generation. Times in milliseconds; ``tpot_ms`` is None for fewer than two tokens."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    ttft_ms: float
    tpot_ms: float | None
    fingerprint: str | None = None


class _Metric(NamedTuple):
    """A line of a page of metrics; ``name`` is without vLLM's prefix."""

    name: str
    labels: str
    value: str


class Counters(NamedTuple):
    """What an engine has counted since its start; 0: not counted.

    Attributes:
        prompt_tokens: Tokens of answered prompts.
        output_tokens: Generated tokens.
        ttft_s: Sum of the times to a first token, in seconds.
        first_tokens: Number of those times.
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
        return Counters(*map(sub, self, earlier))

    def plus(self, other: Counters) -> Counters:
        """Return the sum of both."""
        return Counters(*map(add, self, other))


class _ParsedAnswer(BaseModel):
    """The fields that are read of an answer. Others are ignored."""

    model_config = ConfigDict(frozen=True)


class TokenScore(NamedTuple):
    """How likely an engine finds a token in its place.

    Attributes:
        logprob: Its log-probability, in nats.
        rank: Its place among all tokens by likelihood, from 1.
    """

    logprob: float
    rank: int


class SampledText(NamedTuple):
    """Tokens that an engine drew, with the log-probability of each before temperature and cuts, in nats."""

    text: str
    logprobs: tuple[float, ...]
    finish_reason: str | None


class _ModelList(_ParsedAnswer):
    # adapters may follow the model, without a context length
    data: Annotated[tuple[Any, ...], Field(min_length=1)]


class _Card(_ParsedAnswer):
    id: str
    max_model_len: Annotated[int, Field(ge=1)]
    root: str | None = None


class _AdapterCard(_ParsedAnswer):
    id: str
    parent: str | None = None  # the model that an adapter belongs to


class _TokenIds(_ParsedAnswer):
    tokens: tuple[int, ...]


class _Choices(_ParsedAnswer):
    choices: tuple[dict[str, Any], ...]


class _TokenScore(_ParsedAnswer):
    logprob: float


class _RankedScore(_TokenScore):
    rank: Annotated[int, Field(ge=1)]


class _RankedPrompt(_ParsedAnswer):
    prompt_logprobs: tuple[dict[str, _RankedScore] | None, ...]


class _ScoredPrompt(_ParsedAnswer):
    # One entry a token, with the scores of that token and of likelier ones by their ids; the first token has none.
    prompt_logprobs: tuple[dict[str, _TokenScore] | None, ...]


class _TokenLogprobs(_ParsedAnswer):
    token_logprobs: tuple[float, ...]


class _Sample(_ParsedAnswer):
    text: str
    logprobs: _TokenLogprobs
    finish_reason: str | None = None


class _Detokenized(_ParsedAnswer):
    prompt: str


class _Version(_ParsedAnswer):
    version: str


class _ScoredCompletion(_ParsedAnswer):
    token_ids: tuple[int, ...]
    logprobs: _TokenLogprobs


class _StreamedDelta(_ParsedAnswer):
    content: str | None = None
    # a thought that the engine tells apart is generated text too; older releases name it reasoning_content
    reasoning: str | None = None
    reasoning_content: str | None = None

    @property
    def piece(self) -> str | None:
        """Return its text, or that of the thought before it."""
        return self.content or self.reasoning or self.reasoning_content


class _StreamedChoice(_ParsedAnswer):
    delta: _StreamedDelta | None = None
    text: str | None = None

    @property
    def piece(self) -> str:
        """Return its text, which chats have in a delta."""
        text = self.delta.piece if self.delta is not None else self.text
        return text or ""


class _StreamedUsage(_ParsedAnswer):
    prompt_tokens: Annotated[int, Field(ge=0)]
    completion_tokens: Annotated[int, Field(ge=0)]


class _StreamedChunk(_ParsedAnswer):
    choices: tuple[_StreamedChoice, ...] = ()
    usage: _StreamedUsage | None = None
    system_fingerprint: str | None = None

    @property
    def text(self) -> str:
        return "".join(choice.piece for choice in self.choices)


class _ReceivedStream:
    """The chunks of a stream so far, and when their text arrived. The time begins when it is made."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._texts: list[str] = []
        self._usage = _StreamedUsage(prompt_tokens=0, completion_tokens=0)
        self._fingerprint: str | None = None
        self._first_text_at: float | None = None
        self._last_text_at = 0.0

    def add(self, chunk: _StreamedChunk) -> None:
        """Take the next chunk."""
        self._usage = chunk.usage or self._usage
        self._fingerprint = chunk.system_fingerprint or self._fingerprint
        text = chunk.text
        if text:
            self._last_text_at = time.monotonic()
            if self._first_text_at is None:
                self._first_text_at = self._last_text_at
            self._texts.append(text)

    def generation(self) -> Generation:
        """Return the complete answer. Without any text its first token counts as arriving now."""
        if self._first_text_at is None:
            first_text_at = time.monotonic()
            streamed_ms = 0.0
        else:
            first_text_at = self._first_text_at
            streamed_ms = (self._last_text_at - self._first_text_at) * 1000
        tokens = self._usage.completion_tokens
        tpot_ms = streamed_ms / (tokens - 1) if tokens > 1 else None
        return Generation(
            text="".join(self._texts),
            prompt_tokens=self._usage.prompt_tokens,
            completion_tokens=tokens,
            ttft_ms=(first_text_at - self._started) * 1000,
            tpot_ms=tpot_ms,
            fingerprint=self._fingerprint,
        )


_Read = TypeVar("_Read", bound=_ParsedAnswer)


@dataclass(frozen=True, slots=True)
class EngineProbe:
    """A client of one engine's probing surface.

    Attributes:
        client: Shared; its timeouts hold for the short calls.
        url: The engine's base URL.
        api_key: Sent as a bearer token.
        priority: Of generations; vLLM computes lower numbers first. None: none is sent, as an engine without priority
            scheduling requires.
    """

    client: httpx.AsyncClient
    url: str
    api_key: str
    priority: int | None = None
    # GET requests by path: making one takes longer than sending it.
    _gets: dict[str, httpx.Request] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    async def alive(self) -> bool:
        """Tell whether ``/health`` answers 200. An engine that is alive need not be warm."""
        return await self.ailment() is None

    async def ailment(self) -> str | None:
        """Return why ``/health`` does not answer 200; None: it does."""
        try:
            await self._content("/health")
        except ProbeError as error:
            return str(error)
        return None

    async def readings(self) -> tuple[Gauges, Counters]:
        """Read the engine's gauges and counters from ``/metrics``.

        With data parallelism a page has each metric once for every engine core: all of them count, and the usage of the KV
        cache is their mean.

        Raises:
            ProbeError: The engine does not answer, or the metrics are missing or not numbers.
        """
        path = "/metrics"
        metrics = _parse_metrics(await self._content(path))
        gauges: defaultdict[str, list[float]] = defaultdict(list)
        for metric in metrics:
            if metric.name in _GAUGES:
                gauges[metric.name].append(self._number(metric))
        usages = gauges["kv_cache_usage_perc"] or gauges["gpu_cache_usage_perc"]
        if not usages or not gauges["num_requests_running"]:
            raise ProbeError(f"{self.url}{path} has no vLLM gauges")
        counters = self._sum_counters(metrics)
        cache_config = _cache_config(metrics)
        return (
            Gauges(
                running=int(sum(gauges["num_requests_running"])),
                waiting=int(sum(gauges["num_requests_waiting"])),
                kv_cache_usage=sum(usages) / len(usages),
                kv_cache_tokens=sum(map(int, _KV_TOKENS.findall(cache_config))) or None,
                drafted=int(counters["spec_decode_num_draft_tokens_total"]),
                accepted=int(counters["spec_decode_num_accepted_tokens_total"]),
                kv_block_tokens=_first_int(_KV_BLOCK, cache_config) or None,
                cache_queries=int(counters["prefix_cache_queries_total"]),
                cache_hits=int(counters["prefix_cache_hits_total"]),
            ),
            Counters(
                prompt_tokens=counters["prompt_tokens_total"],
                output_tokens=counters["generation_tokens_total"],
                ttft_s=counters["time_to_first_token_seconds_sum"],
                first_tokens=counters["time_to_first_token_seconds_count"],
                cache_hits=counters["prefix_cache_hits_total"],
                cache_queries=counters["prefix_cache_queries_total"],
            ),
        )

    def _sum_counters(self, metrics: Sequence[_Metric]) -> Mapping[str, float]:
        """Return each counter, summed over its label sets; 0 where there is none."""
        counters: defaultdict[str, float] = defaultdict(float)
        for metric in metrics:
            if metric.name in _COUNTERS:
                counters[metric.name] += self._number(metric)
        return counters

    async def model(self) -> ServedModel:
        """Return what the engine says about the model that it serves.

        Raises:
            ProbeError: The engine does not answer, or lists no model.
        """
        path = "/v1/models"
        content, headers = await self._content_and_headers(path)
        listed = self._checked(_ModelList, path, self._parsed(path, content))
        card = self._checked(_Card, path, listed.data[0])
        more_cards = [
            self._checked(_AdapterCard, path, entry) for entry in listed.data[1:]
        ]
        adapters = {more.id for more in more_cards if more.parent == card.id}
        return ServedModel(
            name=card.id,
            max_model_len=card.max_model_len,
            root=card.root,
            adapters=tuple(sorted(adapters)),
            resumes=headers.get(RESUME_HEADER) == "1",
        )

    async def models(self) -> tuple[ServedModel, ...]:
        """Return all models that are listed, adapters left out: a router lists one for each way to be served.

        Raises:
            ProbeError: The server does not answer, or lists no model with a context.
        """
        path = "/v1/models"
        listed = self._checked(_ModelList, path, await self._json(path))
        models = []
        for entry in listed.data:
            if self._checked(_AdapterCard, path, entry).parent is None:
                card = self._checked(_Card, path, entry)
                models.append(ServedModel(card.id, card.max_model_len, card.root))
        return tuple(models)

    async def version(self) -> str | None:
        """Return vLLM's release; None: the server does not tell it."""
        try:
            answer = await self._json("/version")
            return self._checked(_Version, "/version", answer).version
        except ProbeError:
            return None

    async def kv_cache_dtype(self) -> str | None:
        """Return the type of the KV cache as vLLM names it, such as ``auto``; None: the server does not tell it."""
        try:
            metrics = _parse_metrics(await self._content("/metrics"))
        except ProbeError:
            return None
        match = _CACHE_DTYPE.search(_cache_config(metrics))
        return match[1] if match else None

    async def load_adapter(self, adapter: Adapter) -> None:
        """Have the engine load an adapter while it runs.

        Raises:
            ProbeError: It does not answer, or refuses.
        """
        body = {"lora_name": adapter.name, "lora_path": adapter.path}
        await self._content(
            "/v1/load_lora_adapter",
            body,
            timeout_s=LOAD_S,
            may_repeat=False,
        )

    async def unload_adapter(self, name: str) -> None:
        """Have the engine forget an adapter.

        Raises:
            ProbeError: It does not answer, or refuses.
        """
        await self._content(
            "/v1/unload_lora_adapter",
            {"lora_name": name},
            timeout_s=LOAD_S,
            may_repeat=False,
        )

    async def chat_tokens(
        self, model: str, messages: Sequence[Mapping[str, str]]
    ) -> list[int]:
        """Return the ids of messages rendered through the engine's chat template.

        Raises:
            ProbeError: The engine does not answer, or not with ids.
        """
        return await self._tokenized({"model": model, "messages": list(messages)})

    async def text_tokens(
        self, model: str, text: str, *, special: bool = False
    ) -> list[int]:
        """Return the ids of plain text; ``special``: with the special tokens that a prompt begins with.

        Raises:
            ProbeError: The engine does not answer, or not with ids.
        """
        return await self._tokenized(
            {"model": model, "prompt": text, "add_special_tokens": special}
        )

    async def rendered_tokens(
        self, model: str, chat: Mapping[str, Any]
    ) -> tuple[int, ...]:
        """Return the ids of a chat, with tools or other fields of ``/tokenize``, rendered through the chat template.

        Raises:
            RefusedError: The template or the engine does not take such a chat.
            ProbeError: The engine does not answer, or not with ids.
        """
        return tuple(await self._tokenized({"model": model, **chat}))

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included.

        Raises:
            ProbeError: The engine does not answer, or not with text.
        """
        path = "/detokenize"
        body = {"model": model, "tokens": list(token_ids)}
        answer = await self._json(path, body)
        return self._checked(_Detokenized, path, answer).prompt

    async def token_scores(
        self, model: str, token_ids: Sequence[int], timeout_s: float
    ) -> tuple[TokenScore, ...]:
        """Return log-probability and rank of each token but the first, given those before it: one prefill.

        Raises:
            NoScoresError: The engine's answer has none.
            ProbeError: The engine does not answer within ``timeout_s``.
        """
        answer = await self._json(
            COMPLETIONS, _scoring_body(model, token_ids), timeout_s=timeout_s
        )
        scores = self._only_choice(_RankedPrompt, answer).prompt_logprobs[1:]
        try:
            scored_tokens = zip(scores, token_ids[1:], strict=True)
            places = [score[str(token)] for score, token in scored_tokens if score]
        except (KeyError, ValueError) as error:
            raise self._other_tokens() from error
        return tuple(TokenScore(place.logprob, place.rank) for place in places)

    async def sample(
        self, body: Mapping[str, Any], timeout_s: float
    ) -> tuple[SampledText, ...]:
        """Return the answers to a completion; what its body leaves out, such as the temperature, the engine decides.

        Raises:
            NoScoresError: They have no log-probabilities.
            ProbeError: The engine does not answer within ``timeout_s``.
        """
        request = {**body, "logprobs": 0}
        answer = await self._json(COMPLETIONS, request, timeout_s=timeout_s)
        choices = self._checked(_Choices, COMPLETIONS, answer).choices
        samples = [self._scored(_Sample, choice) for choice in choices]
        return tuple(
            SampledText(
                sample.text, sample.logprobs.token_logprobs, sample.finish_reason
            )
            for sample in samples
        )

    async def chat(
        self, body: Mapping[str, Any], timeout_s: float
    ) -> Mapping[str, Any]:
        """Return the first choice's message of a chat that is not streamed, as the engine's parsers made it.

        Raises:
            RefusedError: The engine does not take such a request.
            ProbeError: The engine does not answer within ``timeout_s``, or not with a message.
        """
        answer = await self._json(CHAT, body, timeout_s=timeout_s)
        choices = self._checked(_Choices, CHAT, answer).choices
        message = choices[0].get("message") if choices else None
        if not isinstance(message, dict):
            raise ProbeError(f"{self.url}{CHAT} answers without a message")
        return message

    async def ask(
        self, path: str, body: Mapping[str, Any], timeout_s: float
    ) -> Mapping[str, Any]:
        """Return the engine's complete answer to a request, a JSON object, as it is.

        Raises:
            RefusedError: The engine does not take such a request.
            BusyError: It has no room for the request now.
            ProbeError: The engine does not answer within ``timeout_s``, or not with an object.
        """
        answer = await self._json(path, body, timeout_s=timeout_s)
        self._checked(_ParsedAnswer, path, answer)
        assert isinstance(answer, dict)
        return answer

    async def prompt_logprobs(
        self, model: str, token_ids: Sequence[int], timeout_s: float
    ) -> tuple[float, ...]:
        """Return the log-probability of each token but the first, given those before it, in nats: one prefill.

        Raises:
            ProbeError: The engine does not answer within ``timeout_s``, or without log-probabilities.
        """
        answer = await self._json(
            COMPLETIONS, _scoring_body(model, token_ids), timeout_s=timeout_s
        )
        choice = self._only_choice(_ScoredPrompt, answer)
        # the first token follows nothing, and has no score
        scores = choice.prompt_logprobs[1:]
        try:
            scored_tokens = zip(scores, token_ids[1:], strict=True)
            return tuple(
                score[str(token)].logprob for score, token in scored_tokens if score
            )
        except (KeyError, ValueError) as error:
            raise self._other_tokens() from error

    async def continuation(
        self, model: str, token_ids: Sequence[int], count: int, timeout_s: float
    ) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Return exactly ``count`` tokens that continue a prompt greedily, and the log-probability of each, in nats.

        Raises:
            ProbeError: The engine does not answer within ``timeout_s``, or without token ids and log-probabilities.
        """
        body = {
            "model": model,
            "prompt": list(token_ids),
            "max_tokens": count,
            **GREEDY,
            "ignore_eos": True,
            "return_token_ids": True,
            "logprobs": 0,
        }
        answer = await self._json(COMPLETIONS, body, timeout_s=timeout_s)
        choice = self._only_choice(_ScoredCompletion, answer)
        if len(choice.token_ids) != len(choice.logprobs.token_logprobs):
            raise ProbeError(
                f"{self.url}{COMPLETIONS} gives other numbers of tokens and of log-probabilities"
            )
        return choice.token_ids, choice.logprobs.token_logprobs

    def _only_choice(self, kind: type[_Read], answer: object) -> _Read:
        """Return the one choice of a completion, whose fields older releases of vLLM and other servers may lack.

        Raises:
            NoScoresError: It lacks them.
            ProbeError: It is an error, or not one choice.
        """
        choices = self._checked(_Choices, COMPLETIONS, answer).choices
        if len(choices) != 1:
            raise ProbeError(
                f"{self.url}{COMPLETIONS} gives {len(choices)} answers to one prompt"
            )
        return self._scored(kind, choices[0])

    def _scored(self, kind: type[_Read], choice: Mapping[str, Any]) -> _Read:
        """Validate one choice of a completion.

        Raises:
            NoScoresError: It lacks fields.
        """
        try:
            return kind.model_validate(choice)
        except ValidationError as error:
            raise NoScoresError(
                f"{self.url}{COMPLETIONS} gives no log-probabilities with token ids, which older releases of vLLM do not"
            ) from error

    def _other_tokens(self) -> ProbeError:
        return ProbeError(
            f"{self.url}{COMPLETIONS} scores other tokens than those of the prompt"
        )

    async def takes_thinking(self, model: str, timeout_s: float) -> bool:
        """Tell whether the engine takes a bound on tokens of reasoning; vLLM refuses it for a model that shows none."""
        messages = [{"role": "user", "content": "1"}]
        body = {
            "model": model,
            "messages": messages,
            "max_tokens": 1,
            "thinking_token_budget": 1,
        }
        try:
            await self._json(CHAT, body, timeout_s=timeout_s)
        except ProbeError:
            return False
        return True

    async def generate(
        self, path: str, body: Mapping[str, Any], timeout_s: float
    ) -> Generation:
        """Stream one generation and time it.

        Raises:
            ProbeError: The engine refuses the request, takes longer than ``timeout_s``, or sends no complete stream.
        """
        request = {
            **body,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
        }
        async with self._errors(path, timeout_s):
            return await self._stream(path, request)

    async def _stream(self, path: str, body: Mapping[str, Any]) -> Generation:
        received = _ReceivedStream()
        async with self.client.stream(
            "POST",
            f"{self.url}{path}",
            json=body,
            headers=self._headers(),
            timeout=None,
        ) as response:
            if response.status_code != httpx.codes.OK:
                raise self._refusal(
                    path, response.status_code, await self._read(path, response)
                )
            async with aclosing(self._events(path, response)) as events:
                async for data in events:
                    received.add(
                        self._checked(_StreamedChunk, path, self._parsed(path, data))
                    )
        return received.generation()

    async def _events(
        self, path: str, response: httpx.Response
    ) -> AsyncGenerator[bytes, None]:
        """Yield the data of a stream's events up to ``[DONE]``, and read to its end."""
        unfinished_line = b""
        size = 0
        is_done = False
        async for piece in response.aiter_bytes():
            size += len(piece)
            if size > MAX_BYTES:
                raise ProbeError(
                    f"{self.url}{path} answers more than {MAX_BYTES} bytes"
                )
            *lines, unfinished_line = (unfinished_line + piece).split(b"\n")
            for line in lines:
                name, _, data = line.partition(b":")
                if name != b"data":
                    continue
                is_done = is_done or data.strip() == b"[DONE]"
                if not is_done:
                    yield data.strip()
        if not is_done:
            raise ProbeError(f"{self.url}{path}: the stream ends without [DONE]")

    async def _tokenized(self, body: Mapping[str, Any]) -> list[int]:
        path = "/tokenize"
        answer = await self._json(path, body)
        return list(self._checked(_TokenIds, path, answer).tokens)

    async def _json(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> object:
        return self._parsed(path, await self._content(path, body, timeout_s=timeout_s))

    async def _content(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        *,
        may_repeat: bool = True,
    ) -> bytes:
        """Return the body of an answer of status 200; the parameters are those of ``_content_and_headers``."""
        content, _ = await self._content_and_headers(
            path, body, timeout_s, may_repeat=may_repeat
        )
        return content

    async def _content_and_headers(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        *,
        may_repeat: bool = True,
    ) -> tuple[bytes, httpx.Headers]:
        """Return the body of an answer of status 200, and its headers.

        Args:
            path: Path and query.
            body: What is sent, as JSON, in a POST request; None: a GET request is sent.
            timeout_s: Longest time of a POST request; None: the client's for each step, and ``ANSWER_S`` in all.
            may_repeat: Send the request once more if the server closes its connection before it has answered.

        Raises:
            ProbeError: There is none in time, it is too long, or it has another status.
        """
        if (
            self.priority is not None
            and body is not None
            and path in {CHAT, COMPLETIONS}
        ):
            body = {**body, "priority": self.priority}
        limit_s = ANSWER_S
        if timeout_s is not None:
            limit_s = timeout_s
        request = self._request(path, body, timeout_s)
        async with self._errors(path, limit_s):
            try:
                response, content = await self._whole_answer(path, request)
            except _CLOSED_ERRORS:
                if not may_repeat:
                    raise
                response, content = await self._whole_answer(path, request)
        if response.status_code != httpx.codes.OK:
            raise self._refusal(path, response.status_code, content)
        return content, response.headers

    def _request(
        self, path: str, body: Mapping[str, Any] | None, timeout_s: float | None
    ) -> httpx.Request:
        """Return the POST request with a body, or a path's GET request, which is made once."""
        if body is None:
            request = self._gets.get(path)
            if request is None:
                request = self._make_request("GET", path)
                self._gets[path] = request
            return request
        return self._make_request("POST", path, body, timeout_s)

    def _make_request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> httpx.Request:
        timeout: httpx.Timeout | float = self.client.timeout
        if timeout_s is not None:
            timeout = timeout_s
        return self.client.build_request(
            method,
            f"{self.url}{path}",
            json=body,
            headers=self._headers(),
            timeout=timeout,
        )

    async def _whole_answer(
        self, path: str, request: httpx.Request
    ) -> tuple[httpx.Response, bytes]:
        response = await self.client.send(request, stream=True)
        try:
            content = await self._read(path, response)
        finally:
            await response.aclose()
        # break the reference cycle between the answer and its stream
        response.stream = httpx.ByteStream(b"")
        return response, content

    @asynccontextmanager
    async def _errors(self, path: str, limit_s: float) -> AsyncGenerator[None]:
        """Limit the time, and turn the client's errors into ``ProbeError``."""
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError as error:
            raise ProbeError(
                f"{self.url}{path}: no complete answer within {limit_s:g} s"
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ProbeError(
                f"{self.url}{path}: {type(error).__name__} {error}".rstrip()
            ) from error

    async def _read(self, path: str, response: httpx.Response) -> bytes:
        content = bytearray()
        async for piece in response.aiter_bytes():
            content += piece
            if len(content) > MAX_BYTES:
                raise ProbeError(
                    f"{self.url}{path} answers more than {MAX_BYTES} bytes"
                )
        return bytes(content)

    def _refusal(self, path: str, status: int, content: bytes) -> ProbeError:
        kind = _REFUSALS.get(status, ProbeError)
        return kind(
            f"{self.url}{path}: HTTP {status}: {content.decode(errors='replace')[:SHOWN_CHARS]}"
        )

    def _parsed(self, path: str, content: bytes) -> object:
        try:
            return from_json(content, cache_strings="keys")
        except ValueError as error:
            raise ProbeError(
                f"{self.url}{path} does not answer JSON ({error}): {content[:SHOWN_CHARS]!r}"
            ) from None

    def _checked(self, kind: type[_Read], path: str, answer: object) -> _Read:
        """Validate an answer, which may also report an error."""
        reported_error = answer.get("error") if isinstance(answer, dict) else None
        if reported_error:
            message = (
                reported_error.get("message")
                if isinstance(reported_error, dict)
                else reported_error
            )
            raise ProbeError(
                f"{self.url}{path} answers with an error: {str(message)[:SHOWN_CHARS]}"
            )
        try:
            return kind.model_validate(answer)
        except ValidationError as error:
            first_fault = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(map(str, first_fault["loc"])) or "the answer"
            raise ProbeError(
                f"{self.url}{path} does not answer as vLLM does: {field}: {first_fault['msg']}"
            ) from None

    def _number(self, metric: _Metric) -> float:
        try:
            value = float(metric.value)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value >= 0):
            raise ProbeError(
                f"{self.url}/metrics: vllm:{metric.name} is {metric.value[:50]}, which is no number from 0 up"
            )
        return value

    def _headers(self) -> dict[str, str]:
        if not self.api_key:
            return {}
        return {"authorization": f"Bearer {self.api_key}"}


def _scoring_body(model: str, token_ids: Sequence[int]) -> dict[str, Any]:
    """Return a request for the scores of a prompt's tokens. vLLM computes them anew, whatever its prefix cache holds."""
    return {
        "model": model,
        "prompt": list(token_ids),
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": 0,
    }


def _parse_metrics(page: bytes) -> list[_Metric]:
    """Return what is read of a page of metrics, in the page's order."""
    lines = "\n" + page.decode(errors="replace")
    return [_Metric(*match) for match in _METRIC.findall(lines)]


def _cache_config(metrics: Sequence[_Metric]) -> str:
    """Return the labels that hold the configuration of an engine's KV cache, one line for each of its metrics."""
    return "\n".join(
        metric.labels for metric in metrics if metric.name == _CACHE_CONFIG
    )


def _first_int(pattern: re.Pattern[str], cache_config: str) -> int | None:
    """Return the number that a pattern finds first; None: it finds none."""
    match = pattern.search(cache_config)
    if match is None:
        return None
    return int(match[1])
