"""A fake vLLM server whose model answers what it is asked: it may think and call tools, rightly or with a known rate of errors.

A token is a word with the white space behind it. ``tests/engine/test_5_thinking.py`` runs one script against this fake and
against a real engine that thinks in the same way, and compares what comes back.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import zlib
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from router.profiling.model_answer import ModelAnswer, ToolCall
from tests.fakes.engine import FINGERPRINT, Behaviour, Exchange, FakeEngine
from tiers.verification.thinking import SWITCH_NAMES, THOUGHT_TAGS, ThoughtTags

WORD = re.compile(r"\s*\S+\s*")
# What the token ids of these servers stand for: all have one tokenizer.
WORDS: dict[int, str] = {}
FIRST_WORD_ID = 100_000
WORD_IDS = 1 << 30
TOOL_CALL = ThoughtTags("<tool_call>", "</tool_call>")
NO_TOOL_PARSER = (
    '"auto" tool choice requires --enable-auto-tool-choice and '
    "--tool-call-parser to be set"
)
# The answer that a model without answers of its own gives to everything.
PARIS = ModelAnswer(text="The capital of France is Paris.")
AnswerTo = Callable[[Mapping[str, Any]], ModelAnswer]


def answer_paris(_body: Mapping[str, Any]) -> ModelAnswer:
    """Answer as if the question were that for the capital of France."""
    return PARIS


@dataclass(slots=True)
class ThinkingModel:
    """What the model of a fake does, and what its engine makes of that.

    Attributes:
        answer_to: What it answers to a chat's body, where no limit cuts it.
        thought: What it thinks before each answer; empty: it does not think. ``thinking_token_budget`` bounds it.
        tags: The marks around its thoughts.
        has_switch: Its template lets requests switch thinking on and off.
        thinks_by_default: With a switch: it thinks where a request says nothing of it.
        is_opened_by_prompt: Its template opens the thought, so that the model writes the closing tag alone.
        reasoning_field: Where the engine tells reasoning apart; None: it has no parser, and leaves it in the text.
        has_tool_parser: The engine tells tool calls apart; without a parser it refuses tools.
    """

    answer_to: AnswerTo = answer_paris
    thought: str = "Let me think about this question for a while."
    tags: ThoughtTags = THOUGHT_TAGS[0]
    has_switch: bool = False
    thinks_by_default: bool = True
    is_opened_by_prompt: bool = False
    reasoning_field: str | None = None
    has_tool_parser: bool = True

    def thinks(self, body: Mapping[str, Any]) -> bool:
        """Tell whether it thinks before its answer to a chat."""
        if not self.thought:
            return False
        wishes = body.get("chat_template_kwargs") or {}
        if self.has_switch and SWITCH_NAMES[0] in wishes:
            return bool(wishes[SWITCH_NAMES[0]])
        return self.thinks_by_default

    def render(self, body: Mapping[str, Any]) -> str:
        """Return a chat's prompt as its template writes it."""
        turns = [
            f"<|{message['role']}|>\n{json.dumps(message)}\n"
            for message in body["messages"]
        ]
        tools = f"{json.dumps(body['tools'])}\n" if body.get("tools") else ""
        return f"{tools}{''.join(turns)}<|assistant|>\n{self._opening(body)}"

    def _opening(self, body: Mapping[str, Any]) -> str:
        """Return what stands behind the mark of the assistant's turn."""
        if self.thinks(body):
            return f"{self.tags.opening}\n" if self.is_opened_by_prompt else ""
        # A template with a switch has a thought that is already over, as Qwen3's.
        is_skipped = self.has_switch
        return f"{self.tags.opening}\n\n{self.tags.closing}\n\n" if is_skipped else ""

    def write(self, body: Mapping[str, Any]) -> str:
        """Return all that the model writes to a chat, without a limit."""
        answer = self.answer_to(body)
        calls = [
            f"{TOOL_CALL.opening}\n{_call_json(call)}\n{TOOL_CALL.closing}"
            for call in answer.tool_calls
        ]
        written = "\n".join(filter(None, (answer.text, *calls)))
        if not self.thinks(body):
            return written
        opening = "" if self.is_opened_by_prompt else f"{self.tags.opening}\n"
        return f"{opening}{self._thought(body)}\n{self.tags.closing}\n\n{written}"

    def _thought(self, body: Mapping[str, Any]) -> str:
        """Return what it thinks, up to a bound that the engine holds it to."""
        bound = body.get("thinking_token_budget")
        return "".join(WORD.findall(self.thought)[:bound])


class _ParsedText(NamedTuple):
    """What an engine's parsers make of a text."""

    reasoning: str | None
    content: str | None
    tool_calls: list[dict[str, Any]]


@dataclass(slots=True)
class KnownAnswers:
    """Answers to known prompts, of which a known share is wrong: always those to the same prompts.

    Attributes:
        answers: The right answer by the first message of the user.
        wrong_share: The share of prompts that are answered wrongly, 0..1.
        seed: Another seed gets other prompts wrong.
    """

    answers: Mapping[str, ModelAnswer] = field(default_factory=dict)
    wrong_share: float = 0.0
    seed: int = 0

    def __call__(self, body: Mapping[str, Any]) -> ModelAnswer:
        prompt = next(
            message["content"]
            for message in body["messages"]
            if message["role"] == "user"
        )
        answer = self.answers.get(prompt, PARIS)
        return spoil(answer) if self.is_wrong(prompt) else answer

    def is_wrong(self, prompt: str) -> bool:
        """Tell whether the answer to a prompt is wrong."""
        digest = hashlib.sha256(f"{self.seed} {prompt}".encode()).digest()
        return int.from_bytes(digest[:4], "big") < self.wrong_share * 2**32


def spoil(answer: ModelAnswer) -> ModelAnswer:
    """Return a wrong answer: a call without its last argument, or without any of another name, or another text."""
    if not answer.tool_calls:
        return ModelAnswer(text="I cannot say.")
    first, *others = answer.tool_calls
    arguments = json.loads(first.arguments)
    if arguments:
        arguments.popitem()
        spoiled = ToolCall(name=first.name, arguments=json.dumps(arguments))
    else:
        spoiled = ToolCall(name=f"{first.name}_all", arguments="{}")
    return answer.model_copy(update={"tool_calls": (spoiled, *others)})


class ModelEngine(FakeEngine):
    """The fake's application; ``model`` may be changed between requests."""

    def __init__(
        self, model: ThinkingModel | None = None, behaviour: Behaviour | None = None
    ) -> None:
        super().__init__(behaviour)
        self.model = model or ThinkingModel()
        # vLLM bounds thoughts only where a parser of reasoning knows their tags.
        self.behaviour.thinks = self.model.reasoning_field is not None

    def _ids(self, text: str) -> list[int]:
        return [_word_id(word) for word in WORD.findall(text)]

    def _shown(self, token: int) -> bytes:
        return WORDS[token].encode()

    async def _tokenize(self, request: Request) -> Response:
        body = await request.json()
        text = self.model.render(body) if "messages" in body else body["prompt"]
        tokens = self._ids(text)
        return JSONResponse(
            {
                "count": len(tokens),
                "max_model_len": self.behaviour.max_model_len,
                "tokens": tokens,
                "token_strs": None,
            }
        )

    async def _whole(self, body: dict[str, Any], *, chat: bool) -> Response:
        if not chat:
            return await super()._whole(body, chat=chat)
        refusal = self._refusal(body)
        if refusal is not None:
            return refusal
        self.behaviour.running += 1
        try:
            written = self._written(body)
            for number, _ in enumerate(written.tokens):
                await self._compute(number, body)
        finally:
            self.behaviour.running -= 1
        return self._chat_answer(body, written)

    def _refusal(self, body: dict[str, Any]) -> Response | None:
        """Refuse what vLLM refuses: tools without a parser, and more tokens than the context has room for."""
        why = None
        prompt_tokens = len(self._ids(self.model.render(body)))
        context = self.behaviour.max_model_len
        if body.get("tools") and not self.model.has_tool_parser:
            why = NO_TOOL_PARSER
        elif prompt_tokens + self._most(body, chat=True) > context and body.get(
            "max_tokens"
        ):
            why = (
                f"This model's maximum context length is {context} tokens. However, you requested {body['max_tokens']} "
                f"output tokens and your prompt contains {prompt_tokens} input tokens."
            )
        if why is None:
            return None
        error = {"message": why, "type": "BadRequestError", "param": None, "code": 400}
        return JSONResponse({"error": error}, 400)

    def _written(self, body: dict[str, Any]) -> _Written:
        words = WORD.findall(self.model.write(body))
        limit = self._most(body, chat=True)
        # Behind its last word the model writes the end of its turn, which is a token too.
        return _Written(tuple(words[:limit]), is_cut=len(words) >= limit)

    def _chat_answer(self, body: dict[str, Any], written: _Written) -> Response:
        parsed = self._parse(body, written.text)
        message = {
            "role": "assistant",
            "content": parsed.content,
            "tool_calls": parsed.tool_calls,
        }
        if self.model.reasoning_field is not None:
            message[self.model.reasoning_field] = parsed.reasoning
        reason = _finish_reason(parsed, written)
        tokens = len(written.tokens)
        usage = self._usage(tokens)
        if self.model.reasoning_field is not None:
            usage["completion_tokens_details"] = {
                "reasoning_tokens": len(WORD.findall(parsed.reasoning or ""))
            }
        choice = {"index": 0, "message": message, "finish_reason": reason}
        members: dict[str, Any] = {
            "choices": [choice | self._scores(body, tokens, chat=True)],
            "usage": usage,
            "system_fingerprint": FINGERPRINT,
        }
        if body.get("return_token_ids"):
            members["prompt_token_ids"] = self._ids(self.model.render(body))
        answer = JSONResponse(self._fields(members, "chat.completion"))
        self.behaviour.sent.append(bytes(answer.body))
        return answer

    def _parse(self, body: dict[str, Any], text: str) -> _ParsedText:
        reasoning = None
        content = text
        tags = self.model.tags
        if self.model.reasoning_field is not None and self.model.thinks(body):
            # A text without an end of the thought is all reasoning, as for vLLM's parser deepseek_r1.
            thought, closing, content = text.partition(tags.closing)
            reasoning = thought.removeprefix(tags.opening)
            content = content if closing else ""
        calls: list[dict[str, Any]] = []
        if body.get("tools"):
            before, opening, _ = content.partition(TOOL_CALL.opening)
            calls = _calls_in(content)
            content = before if opening and calls else content
        return _ParsedText(reasoning, content.strip() or None, calls)

    async def _events(
        self, body: dict[str, Any], exchange: Exchange, *, chat: bool
    ) -> AsyncGenerator[bytes, None]:
        if not chat:
            async for event in super()._events(body, exchange, chat=chat):
                yield event
            return
        written = self._written(body)
        parsed = self._parse(body, written.text)
        first: dict[str, Any] = {}
        if self.behaviour.resumes and body.get("return_token_ids"):
            first["prompt_token_ids"] = self._ids(self.model.render(body))
        opening = {"role": "assistant", "content": ""}
        yield self._chunk(opening, None, chat=True, **first)
        if self.behaviour.resumes:
            wants_ids = bool(body.get("return_token_ids"))
            async for delta, ids in self._deltas_as_parsed(body, written, exchange):
                if not delta and not wants_ids:
                    yield b""
                    continue
                told_ids = ids if wants_ids else None
                yield self._chunk(delta, None, chat=True, ids=told_ids)
        else:
            for delta in self._deltas(parsed):
                await self._compute(0, body)
                yield self._chunk(delta, None, chat=True)
        tokens = len(written.tokens)
        last = {"system_fingerprint": FINGERPRINT}
        reason = _finish_reason(parsed, written)
        yield self._chunk({"content": ""}, reason, chat=True, **last)
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = {"choices": [], "usage": self._usage(tokens), **last}
            yield self._event(usage, chat=True)
        yield b"data: [DONE]\n\n"

    async def _deltas_as_parsed(
        self, body: dict[str, Any], written: _Written, exchange: Exchange
    ) -> AsyncGenerator[tuple[dict[str, Any], list[int]], None]:
        """Return what a stream tells after each token (empty: nothing), and the tokens; what is known is told at once."""
        sent = _ParsedText(None, None, [])
        tokens = written.tokens
        for number in range(min(exchange.known, len(tokens) - 1), len(tokens)):
            ids = list[int]()
            if number >= exchange.known:
                await self._compute(number, body)
                ids = [_word_id(tokens[number])]
                exchange.computed(ids[0])
            text = "".join(tokens[: number + 1])
            parsed = self._parse_unfinished(body, text)
            yield _delta_between(sent, parsed, self.model.reasoning_field), ids
            sent = parsed

    def _parse_unfinished(self, body: dict[str, Any], text: str) -> _ParsedText:
        """Return what the parsers of a stream make of the text so far: of an unfinished call, the arguments so far."""
        reasoning, content, _ = self._parse({**body, "tools": None}, text)
        content = content or ""
        if not body.get("tools"):
            return _ParsedText(reasoning, content, [])
        before, *sections = content.split(TOOL_CALL.opening)
        calls = [
            _unfinished_call(number, section) for number, section in enumerate(sections)
        ]
        return _ParsedText(reasoning, before.strip(), list(filter(None, calls)))

    def _deltas(self, parsed: _ParsedText) -> list[dict[str, Any]]:
        """Return what a stream tells of an answer, word by word."""
        field_name = self.model.reasoning_field or "content"
        reasoning = [
            {field_name: word} for word in WORD.findall(parsed.reasoning or "")
        ]
        content = [{"content": word} for word in WORD.findall(parsed.content or "")]
        calls = [
            {"tool_calls": [{"index": number, **call}]}
            for number, call in enumerate(parsed.tool_calls)
        ]
        return [*reasoning, *content, *calls]


def _delta_between(
    sent: _ParsedText, parsed: _ParsedText, reasoning_field: str | None
) -> dict[str, Any]:
    """Return what was parsed since what was sent, as a stream tells it."""
    delta: dict[str, Any] = {}
    reasoning = (parsed.reasoning or "").removeprefix(sent.reasoning or "")
    if reasoning and reasoning_field is not None:
        delta[reasoning_field] = reasoning
    content = (parsed.content or "").removeprefix(sent.content or "")
    if content:
        delta["content"] = content
    calls = []
    for number, call in enumerate(parsed.tool_calls):
        arguments = call["function"]["arguments"]
        if number >= len(sent.tool_calls):
            calls.append({"index": number, **call})
            continue
        sent_arguments = sent.tool_calls[number]["function"]["arguments"]
        more = arguments.removeprefix(sent_arguments)
        if more:
            calls.append({"index": number, "function": {"arguments": more}})
    if calls:
        delta["tool_calls"] = calls
    return delta


def _unfinished_call(number: int, section: str) -> dict[str, Any] | None:
    """Return the call that a section of the text begins; None: its name has not come yet."""
    section, closing, _ = section.partition(TOOL_CALL.closing)
    match = re.match(r'\s*\{"name": ("[^"]*"), "arguments": (.*)', section, re.DOTALL)
    if match is None:
        return None
    arguments = match[2]
    # The last brace, and white space, may be the end of the call rather than of its arguments.
    arguments = arguments.strip().removesuffix("}") if closing else _certain(arguments)
    function = {"name": json.loads(match[1]), "arguments": arguments}
    call_id = f"call-{secrets.token_hex(4)}"
    return {"id": call_id, "type": "function", "function": function}


def _certain(arguments: str) -> str:
    """Return the beginning of a call's arguments that is none of the call's own end."""
    return arguments.rstrip().removesuffix("}").rstrip()


def _finish_reason(parsed: _ParsedText, written: _Written) -> str:
    if written.is_cut:
        return "length"
    return "tool_calls" if parsed.tool_calls else "stop"


class _Written(NamedTuple):
    """The tokens that a model wrote within its limit."""

    tokens: tuple[str, ...]
    is_cut: bool

    @property
    def text(self) -> str:
        return "".join(self.tokens)


def _word_id(word: str) -> int:
    word_id = FIRST_WORD_ID + zlib.crc32(word.encode()) % WORD_IDS
    assert WORDS.setdefault(word_id, word) == word, "two words have one id"
    return word_id


def _call_json(call: ToolCall) -> str:
    """Return a call as the models write it that vLLM's parser ``hermes`` reads."""
    return f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}'


def _calls_in(text: str) -> list[dict[str, Any]]:
    """Return the calls in a text in OpenAI's form; none if one of them is broken, as vLLM does."""
    pattern = re.escape(TOOL_CALL.opening) + "(.*?)" + re.escape(TOOL_CALL.closing)
    calls: list[dict[str, Any]] = []
    for number, match in enumerate(re.finditer(pattern, text, re.DOTALL)):
        try:
            call = json.loads(match[1])
        except ValueError:
            return []
        function = {
            "name": call["name"],
            "arguments": json.dumps(call["arguments"], ensure_ascii=False),
        }
        calls.append({"id": f"call-{number}", "type": "function", "function": function})
    return calls
