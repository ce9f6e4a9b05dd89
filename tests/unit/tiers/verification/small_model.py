"""A server that speaks vLLM's API for a model of bytes: its next token depends on the last one, by a table of random numbers.

It computes what real engines compute: greedy texts, samples by temperature, scores of prompts. Switches break it as engines
break. It is slow and exact, and has no kernels.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from starlette.requests import Request

END = 256  # The token that ends an answer; all others are bytes.
VOCABULARY = 257
SPREAD = 3.0  # of the logits
TOOL_CALL = "<tool_call>"


@cache
def logits(last: int, weights: int, noise: float) -> tuple[float, ...]:
    """Return the logits after a token: of other weights others; with noise as a quantized copy of the weights has it."""
    exact = random.Random(f"{weights} {last}")
    rounding = random.Random(f"rounding {weights} {last}")
    return tuple(
        exact.gauss(0, SPREAD) + noise * rounding.gauss(0, 1) for _ in range(VOCABULARY)
    )


@dataclass(slots=True)
class SmallModel:
    """How the server behaves.

    Attributes:
        weights: Seed of the model.
        noise: Of its logits, as of quantized weights, in nats.
        late_from: From this position of the sequence on it computes nonsense; None: it never does.
        decode_noise: A further noise of tokens that are decoded, and not of those of a prompt.
        context: Its context.
        temperature: Its default.
        has_template: Whether it takes chats.
        mark: What its chat template writes before each role.
        takes_system: Whether its template takes a system message.
        offset: Of all token ids, as of another tokenizer.
        joins_marks: Whether marks of chats are tokens of their own.
        stops: Whether the end of a turn ends an answer.
        takes_tools: Whether it has a tool parser.
        drops: The argument that its tool parser loses.
        finds_calls: Whether its tool parser finds a call in an answer.
        writes_calls: Whether the model writes the call that it is made to write, or white space up to its limit.
        thinks: Whether it has a parser of reasoning.
        release: Of vLLM; empty: it is not told.
        cache_dtype: Of its KV cache; empty: it is not told.
        names: Models that it lists.
        scores: Whether it tells log-probabilities.
        requests: The bodies that it was sent, by path.
    """

    weights: int = 1
    noise: float = 0.0
    late_from: int | None = None
    decode_noise: float = 0.0
    context: int = 4096
    temperature: float = 1.0
    has_template: bool = True
    mark: str = "<|im_start|>"
    takes_system: bool = True
    offset: int = 0
    joins_marks: bool = True
    stops: bool = True
    takes_tools: bool = True
    drops: str = ""
    finds_calls: bool = True
    writes_calls: bool = True
    thinks: bool = False
    release: str = "0.32.0"
    cache_dtype: str = "auto"
    names: tuple[str, ...] = ("small",)
    scores: bool = True
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    @property
    def app(self) -> Starlette:
        """Return the server."""
        answers: dict[str, Callable[[dict[str, Any]], Response]] = {
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
            "/v1/completions": self._complete,
            "/v1/chat/completions": self._chat,
        }
        routes = [
            Route(path, self._endpoint(path, answer), methods=["POST"])
            for path, answer in answers.items()
        ]
        routes += [
            Route("/v1/models", self._models),
            Route("/version", self._version),
            Route("/metrics", self._metrics),
        ]
        return Starlette(routes=routes)

    def _endpoint(
        self, path: str, answer: Callable[[dict[str, Any]], Response]
    ) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            body = await request.json()
            self.requests.append((path, body))
            return answer(body)

        return endpoint

    async def _models(self, _request: Request) -> Response:
        cards = [{"id": name, "max_model_len": self.context} for name in self.names]
        adapter = {"id": "adapter", "parent": self.names[0]}
        return JSONResponse({"data": [*cards, adapter]})

    async def _version(self, _request: Request) -> Response:
        if not self.release:
            return Response(status_code=404)
        return JSONResponse({"version": self.release})

    async def _metrics(self, _request: Request) -> Response:
        label = f'block_size="16",cache_dtype="{self.cache_dtype}"'
        page = f"vllm:cache_config_info{{{label}}} 1.0\n" if self.cache_dtype else ""
        return PlainTextResponse(page)

    def _tokenize(self, body: dict[str, Any]) -> Response:
        if "prompt" in body:
            return self._tokens(body["prompt"])
        roles = [message["role"] for message in body["messages"]]
        if not self.has_template or ("system" in roles and not self.takes_system):
            return _refusal("the chat template refuses these messages")
        turns = [self._turn(message) for message in body["messages"]]
        if body.get("tools"):
            turns.insert(0, f"tools: {json.dumps(body['tools'])}\n")
        if body.get("add_generation_prompt", True):
            turns.append(f"{self.mark}assistant\n")
        return self._tokens("".join(turns))

    def _turn(self, message: dict[str, Any]) -> str:
        content = message["content"]
        for call in message.get("tool_calls", ()):
            arguments = json.loads(call["function"]["arguments"])
            written = {"name": call["function"]["name"], "arguments": arguments}
            content += f"{TOOL_CALL}{json.dumps(written)}</tool_call>"
        return f"{self.mark}{message['role']}\n{content}\0"

    def _tokens(self, text: str) -> Response:
        """Answer with tokens; a zero byte stands for the end of a turn."""
        ids = [END if byte == 0 else byte for byte in text.encode()]
        if not self.joins_marks and "<s>" in text:
            ids = ids[1:]
        return JSONResponse({"tokens": [token + self.offset for token in ids]})

    def _detokenize(self, body: dict[str, Any]) -> Response:
        ids = [token - self.offset for token in body["tokens"]]
        text = "".join("<|end|>" if token == END else chr(token) for token in ids)
        return JSONResponse({"prompt": text})

    def _complete(self, body: dict[str, Any]) -> Response:
        prompt = self._ids(body["prompt"])
        generators = [
            random.Random(f"{body.get('seed')} {number}")
            for number in range(body.get("n", 1))
        ]
        choices = [self._choice(prompt, body, generator) for generator in generators]
        return JSONResponse({"choices": choices})

    def _ids(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            return list(prompt.encode())
        return [token - self.offset for token in prompt]

    def _choice(
        self, prompt: list[int], body: dict[str, Any], generator: random.Random
    ) -> dict[str, Any]:
        """Return one answer with its scores, and those of the prompt."""
        ids: list[int] = []
        logprobs: list[float] = []
        while len(ids) < body["max_tokens"] and not self._has_ended(ids, body):
            sequence = [*prompt, *ids]
            scored = self._logprobs(sequence, len(sequence), is_decoded=True)
            token = self._choose(scored, body, generator)
            ids.append(token)
            logprobs.append(scored[token])
        choice: dict[str, Any] = {
            "text": bytes(token for token in ids if token != END).decode("latin-1"),
            "finish_reason": "stop" if self._has_ended(ids, body) else "length",
            "token_ids": [token + self.offset for token in ids],
        }
        if self.scores:
            choice["logprobs"] = {"token_logprobs": logprobs}
            choice["prompt_logprobs"] = self._scored_prompt(prompt, body)
        return choice

    def _has_ended(self, ids: list[int], body: dict[str, Any]) -> bool:
        ends = self.stops and not body.get("ignore_eos")
        return bool(ends and ids and ids[-1] == END)

    def _choose(
        self, scored: Sequence[float], body: dict[str, Any], generator: random.Random
    ) -> int:
        allowed = body.get("allowed_token_ids")
        if allowed:
            return int(allowed[0]) - self.offset
        temperature = body.get("temperature", self.temperature)
        if not temperature:
            return max(range(VOCABULARY), key=scored.__getitem__)
        weights = [math.exp(logprob / temperature) for logprob in scored]
        return generator.choices(range(VOCABULARY), weights)[0]

    def _scored_prompt(
        self, prompt: list[int], body: dict[str, Any]
    ) -> list[dict[str, Any] | None] | None:
        if body.get("prompt_logprobs") is None:
            return None
        entries: list[dict[str, Any] | None] = [None]
        for position in range(1, len(prompt)):
            scored = self._logprobs(prompt, position, is_decoded=False)
            token = prompt[position]
            rank = 1 + sum(logprob > scored[token] for logprob in scored)
            score = {"logprob": scored[token], "rank": rank}
            entries.append({str(token + self.offset): score})
        return entries

    def _logprobs(
        self, sequence: Sequence[int], position: int, *, is_decoded: bool
    ) -> tuple[float, ...]:
        """Return the log-probabilities of the token at a position."""
        weights = self.weights
        noise = self.noise + (self.decode_noise if is_decoded else 0.0)
        if self.late_from is not None and position >= self.late_from:
            weights += 1000
        return _log_softmax(sequence[position - 1], weights, noise)

    def _chat(self, body: dict[str, Any]) -> Response:
        if "thinking_token_budget" in body and not self.thinks:
            return _refusal("thinking_token_budget: no reasoning parser")
        if "tools" in body and not self.takes_tools:
            return _refusal("auto tool choice needs a tool parser")
        message: dict[str, Any] = {"role": "assistant", "content": "Yes."}
        if "structured_outputs" in body:
            message = self._parsed(body["structured_outputs"]["choice"][0])
        return JSONResponse({"choices": [{"index": 0, "message": message}]})

    def _parsed(self, text: str) -> dict[str, Any]:
        """Return what the tool parser makes of a call that the model was made to write."""
        if not self.writes_calls:
            return {"role": "assistant", "content": TOOL_CALL + 100 * "\n"}
        if not self.finds_calls:
            return {"role": "assistant", "content": text}
        written = text.removeprefix(TOOL_CALL).removesuffix("</tool_call>")
        call = json.loads(written)
        call["arguments"].pop(self.drops, None)
        function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": function}],
        }


@cache
def _log_softmax(last: int, weights: int, noise: float) -> tuple[float, ...]:
    values = logits(last, weights, noise)
    total = math.log(sum(math.exp(value) for value in values))
    return tuple(value - total for value in values)


def _refusal(message: str) -> Response:
    return JSONResponse({"error": {"message": message, "code": 400}}, 400)
