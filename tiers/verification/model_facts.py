"""What an engine tells of its model before anything is judged: tokens, chat template, defaults, parsers."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from enum import StrEnum
from statistics import mean
from typing import TYPE_CHECKING, Any, Literal

from tiers.errors import ProbeError, RefusedError
from tiers.together import first_error, run_all
from tiers.verification.findings import EngineIdentity, FrozenFinding

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tiers.probe import SampledText
    from tiers.verification.engine import ComparedEngine

REQUEST_S = 120.0  # Limit of each request, in seconds: an engine's first one may compile kernels.
# Texts in which tokenizers differ: digits, white space, several scripts, code, and the marks of well-known models.
TEXTS: Mapping[str, str] = {
    "prose": "The harbour pilots' guild hasn't met since mid-October, e.g. for re-licensing.",
    "digits": "In 1987 it cost 1,234,567.89 EUR, or 0x1F4 units: 3.14159265358979 and 00012.",
    "white space": "a  b   c\n\n\n  d\t\te \r\n f        g\u00a0h",
    "code": "def f(x: list[int]) -> str:\n    return f\"{x!r}\" if x else ''  # naïve\n",
    "scripts": "Größe, façade, Жить, 漢字かな, العربية, हिन्दी, 🙂🙃, e\u0301",
    "marks": (
        "<s></s><bos><eos><|im_start|><|im_end|><|endoftext|><|begin_of_text|><|eot_id|><|end_of_text|>[INST][/INST]"
        "<start_of_turn><end_of_turn><think></think><tool_call></tool_call><|assistant|><|user|><|end|>"
    ),
}
# The value has quotes, an umlaut and braces, which simple parsers stumble over.
CALL_ARGUMENTS: Mapping[str, Any] = {
    "city": 'Köln "Mitte" {1}',
    "days": 3,
    "unit": "celsius",
}
# Only one call keeps this schema: where an engine holds calls to their schema, the model can write no other.
WEATHER_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_forecast",
        "description": "Look up the weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": [CALL_ARGUMENTS["city"]]},
                "days": {"type": "integer", "enum": [CALL_ARGUMENTS["days"]]},
                "unit": {"type": "string", "enum": [CALL_ARGUMENTS["unit"]]},
            },
            "required": ["city", "days", "unit"],
            "additionalProperties": False,
        },
    },
}
# For checks that a start waits for: each token of a call that an engine is made to write takes a step.
SHORT_ARGUMENTS: Mapping[str, Any] = {"a": 'ö "{1}', "b": 3}
SHORT_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Find a thing.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "string", "enum": [SHORT_ARGUMENTS["a"]]},
                "b": {"type": "integer", "enum": [SHORT_ARGUMENTS["b"]]},
            },
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
_USER = {"role": "user", "content": "Will it rain in Köln tomorrow?"}
_SYSTEM = {"role": "system", "content": "You answer in one sentence."}
_ASSISTANT = {"role": "assistant", "content": "I cannot see the weather."}
_THANKS = {"role": "user", "content": "Thank you."}


def _call_message(
    tool: Mapping[str, Any], arguments: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return an assistant's message that calls a tool."""
    function = {
        "name": tool["function"]["name"],
        "arguments": json.dumps(arguments, ensure_ascii=False),
    }
    call = {"id": "call00001", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


_CALL_MESSAGE = _call_message(WEATHER_TOOL, CALL_ARGUMENTS)
_RESULT = {"role": "tool", "tool_call_id": "call00001", "content": '{"rain_mm": 4}'}
CHATS: Mapping[str, Mapping[str, Any]] = {
    "a question": {"messages": [_USER]},
    "a question without the beginning of an answer": {
        "messages": [_USER],
        "add_generation_prompt": False,
    },
    "a system message": {"messages": [_SYSTEM, _USER]},
    "an assistant's turn": {"messages": [_USER, _ASSISTANT, _THANKS]},
    "a tool": {"messages": [_USER], "tools": [WEATHER_TOOL]},
    "a tool's call and result": {
        "messages": [_USER, _CALL_MESSAGE, _RESULT],
        "tools": [WEATHER_TOOL],
    },
}
_FINISHED_ANSWER = {
    "messages": [_USER, _ASSISTANT],
    "add_generation_prompt": False,
}
# Beginnings that many words can follow, so that sampling defaults show in what is drawn.
OPENINGS = (
    "Once upon a time, in a small village by the sea, there lived",
    "My favourite things to do on a weekend are",
    "The old man opened the box and found",
    "In the year 2150, people will",
)
# So many continuations of an opening come from each request: a router wants a free place for each of them at once.
DRAWS = 8
DRAWN_TOKENS = 4
# An engine without sampling defaults of its own draws with these.
NEUTRAL: Mapping[str, Any] = {
    "temperature": 1,
    "top_p": 1,
    "top_k": 0,
    "min_p": 0,
    "repetition_penalty": 1,
}


class Extent(StrEnum):
    """How much an engine writes for its facts, which takes most of their time.

    Attributes:
        NOTHING: Sampling defaults and tool parser count as not told.
        LITTLE: As much as a start can wait for. Sampling defaults have to differ more before that is certain.
        ALL: What ``qarr verify`` compares.
    """

    NOTHING = "nothing"
    LITTLE = "little"
    ALL = "all"

    def includes(self, other: Extent) -> bool:
        """Tell whether as much as another extent is written, or more."""
        extents = list(Extent)
        return extents.index(self) >= extents.index(other)


@dataclass(frozen=True, slots=True)
class _WritingPlan:
    """What an engine writes for its facts.

    Attributes:
        requests: For random continuations of each opening.
        tool: The function that it is made to call.
        arguments: What it is made to call it with.
    """

    requests: int
    tool: Mapping[str, Any]
    arguments: Mapping[str, Any]

    @property
    def tool_name(self) -> str:
        return str(self.tool["function"]["name"])


WRITING_PLANS: Mapping[Extent, _WritingPlan] = {
    Extent.LITTLE: _WritingPlan(requests=1, tool=SHORT_TOOL, arguments=SHORT_ARGUMENTS),
    Extent.ALL: _WritingPlan(requests=2, tool=WEATHER_TOOL, arguments=CALL_ARGUMENTS),
}


class TextTokens(FrozenFinding):
    """The tokens of a fixed text."""

    name: str
    token_ids: tuple[int, ...]


class RenderedChat(FrozenFinding):
    """A fixed chat as the chat template writes it.

    Attributes:
        name: What the chat has.
        token_ids: Its tokens; empty: the template refuses such a chat.
        text: The same as text, special tokens included; empty if it is refused, or the engine does not detokenize.
    """

    name: str
    token_ids: tuple[int, ...]
    text: str


class DrawnTexts(FrozenFinding):
    """Random continuations of one opening by the engine's own sampling defaults.

    Attributes:
        opening: The beginning.
        logprobs: For each continuation the mean log-probability of its tokens before temperature and cuts, in nats.
        neutral_logprobs: Of continuations that were drawn at temperature 1 without cuts, with the same random numbers. They
            tell apart what the defaults do and what the weights do.
    """

    opening: str
    logprobs: tuple[float, ...]
    neutral_logprobs: tuple[float, ...]


class ParsedCall(FrozenFinding):
    """What an engine's tool parser makes of a call that the model was made to write.

    Attributes:
        name: The function's name; empty: no call was found.
        arguments: The arguments as text.
    """

    name: str
    arguments: str


class ModelFacts(FrozenFinding):
    """What an engine tells of its model. What it does not tell is None or empty.

    Attributes:
        form: Of what is asked: facts of another form, saved by another release, cannot be compared.
        identity: The engine.
        texts: Tokens of the fixed texts.
        chats: The fixed chats; empty: the model has no chat template.
        ends: Tokens that end an answer, of those that the chat template writes after one.
        drawn: Continuations by the engine's sampling defaults.
        call: The tool parser's work; None: it was not tried.
        is_call_written: Whether the model wrote the call that it was made to write; otherwise nothing is known of the
            parser. Where an engine holds calls to their schema, white space is free, and a broken model ends in it.
        thinks: Whether the engine tells the model's reasoning apart from its answers.
        not_told: Sentences about what could not be observed.
    """

    form: Literal[1] = 1
    identity: EngineIdentity
    texts: tuple[TextTokens, ...]
    chats: tuple[RenderedChat, ...]
    ends: tuple[int, ...]
    drawn: tuple[DrawnTexts, ...]
    call: ParsedCall | None
    is_call_written: bool = True
    thinks: bool
    not_told: tuple[str, ...]


async def observe_facts(
    engine: ComparedEngine, extent: Extent = Extent.ALL
) -> ModelFacts:
    """Ask an engine for what ``compare_facts`` compares.

    Args:
        engine: The engine.
        extent: How much the model writes to show its sampling defaults and its tool parser.

    Raises:
        ProbeError: The engine stops answering, or is no vLLM.
    """
    observer = _Observer(engine)
    texts = [await observer.tokenize(name) for name in TEXTS]
    chats = await observer.render_chats()
    if extent is Extent.NOTHING:
        return ModelFacts(
            identity=engine.identity,
            texts=tuple(texts),
            chats=chats,
            ends=await observer.find_ends(),
            drawn=(),
            call=None,
            is_call_written=False,
            thinks=await observer.thinks(),
            not_told=tuple(observer.not_told),
        )
    plan = WRITING_PLANS[extent]
    # The engine computes them in one batch.
    try:
        async with asyncio.TaskGroup() as group:
            ends = group.create_task(observer.find_ends())
            drawn = group.create_task(observer.draw(plan.requests))
            call = group.create_task(observer.parse_call(plan))
            thinks = group.create_task(observer.thinks())
    except ExceptionGroup as errors:
        raise first_error(errors) from errors
    return ModelFacts(
        identity=engine.identity,
        texts=tuple(texts),
        chats=chats,
        ends=ends.result(),
        drawn=drawn.result(),
        call=call.result(),
        is_call_written=observer.is_call_written,
        thinks=thinks.result(),
        not_told=tuple(observer.not_told),
    )


class _Observer:
    """Asks one engine.

    Attributes:
        has_template: Whether it takes chats, once they were rendered.
        is_call_written: Whether the model wrote the call that it was made to write, once that was tried.
        not_told: Sentences about what it does not tell.
    """

    def __init__(self, engine: ComparedEngine) -> None:
        self.engine = engine
        self.probe = engine.probe
        self.model = engine.model
        self.has_template = True
        self.is_call_written = True
        self.not_told: list[str] = []

    def _note(self, sentence: str) -> None:
        self.not_told.append(f"{self.engine.identity.name} {sentence}")

    async def tokenize(self, name: str) -> TextTokens:
        """Return the tokens of a fixed text, special ones included."""
        ids = await self.probe.text_tokens(self.model, TEXTS[name], special=True)
        return TextTokens(name=name, token_ids=tuple(ids))

    async def render_chats(self) -> tuple[RenderedChat, ...]:
        """Return the fixed chats as the template writes them; none if it refuses all."""
        chats = [await self._render(name, CHATS[name]) for name in CHATS]
        self.has_template = any(chat.token_ids for chat in chats)
        if not self.has_template:
            self._note("has no chat template")
            return ()
        return tuple(chats)

    async def _render(self, name: str, chat: Mapping[str, Any]) -> RenderedChat:
        try:
            token_ids = await self.probe.rendered_tokens(self.model, chat)
        except RefusedError:
            return RenderedChat(name=name, token_ids=(), text="")
        return RenderedChat(
            name=name, token_ids=token_ids, text=await self._text_of(token_ids)
        )

    async def _text_of(self, token_ids: Sequence[int]) -> str:
        try:
            return await self.probe.detokenize(self.model, token_ids)
        except ProbeError:
            return ""

    async def find_ends(self) -> tuple[int, ...]:
        """Return which of the last tokens that the template writes after an answer end one when the model chooses them."""
        if not self.has_template:
            return ()
        rendered = await self._render("", _FINISHED_ANSWER)
        last_ids = tuple(dict.fromkeys(rendered.token_ids[-3:]))
        return tuple([token for token in last_ids if await self._is_end(token)])

    async def _is_end(self, token: int) -> bool:
        body = {
            "model": self.model,
            "prompt": OPENINGS[0],
            "max_tokens": 2,
            "allowed_token_ids": [token],
        }
        samples = await self.probe.sample(body, REQUEST_S)
        return samples[0].finish_reason == "stop"

    async def draw(self, requests: int) -> tuple[DrawnTexts, ...]:
        """Draw continuations of all openings, with so many requests for each."""
        return await run_all(
            self._draw_after(opening, requests) for opening in OPENINGS
        )

    async def _draw_after(self, opening: str, requests: int) -> DrawnTexts:
        """Draw continuations without naming any sampling parameter, then neutral ones.

        No seed is named: vLLM 0.32 on a CPU ends when a prompt with a seed is computed in several chunks.
        """
        logprobs: list[float] = []
        neutral_logprobs: list[float] = []
        for _ in range(requests):
            body = {
                "model": self.model,
                "prompt": opening,
                "n": DRAWS,
                "max_tokens": DRAWN_TOKENS,
            }
            samples = await self.probe.sample(body, REQUEST_S)
            logprobs += _mean_logprobs(samples)
            neutral = await self.probe.sample({**body, **NEUTRAL}, REQUEST_S)
            neutral_logprobs += _mean_logprobs(neutral)
        return DrawnTexts(
            opening=opening,
            logprobs=tuple(logprobs),
            neutral_logprobs=tuple(neutral_logprobs),
        )

    async def parse_call(self, plan: _WritingPlan) -> ParsedCall | None:
        """Make the model write a call in its own form, and return what the engine's tool parser makes of it."""
        if not self.has_template:
            return None
        written_call = await self._written_call(plan)
        body = {
            "model": self.model,
            "messages": [_USER],
            "tools": [plan.tool],
            "tool_choice": "auto",
            "temperature": 0,
            # a broken model may write each byte as a token of its own
            "max_tokens": len(written_call.encode()) + 8,
            "structured_outputs": {"choice": [written_call]},
        }
        try:
            message = await self.probe.chat(body, REQUEST_S)
        except RefusedError:
            self._note("takes no tools, so its tool parser was not tried")
            return None
        calls = message.get("tool_calls") or []
        content = message.get("content") or ""
        if not calls and written_call.strip() not in content:
            self.is_call_written = False
            self._note(
                "did not write the call that it was made to write, so its tool parser was not tried"
            )
            return None
        function = calls[0].get("function", {}) if calls else {}
        return ParsedCall(
            name=str(function.get("name") or ""),
            arguments=str(function.get("arguments") or ""),
        )

    async def thinks(self) -> bool:
        """Tell whether the engine tells the model's reasoning apart from its answers."""
        if not self.has_template:
            return False
        return await self.probe.takes_thinking(self.model, REQUEST_S)

    async def _written_call(self, plan: _WritingPlan) -> str:
        """Return how the model writes a call, as its template shows; the most common form where it shows none."""
        chat = {"messages": [_USER], "tools": [plan.tool]}
        call_message = _call_message(plan.tool, plan.arguments)
        finished_call = {
            "messages": [_USER, call_message],
            "tools": [plan.tool],
            "add_generation_prompt": False,
        }
        opened = (await self._render("", chat)).text
        finished = (await self._render("", finished_call)).text
        answered = (await self._render("", _FINISHED_ANSWER)).text
        if opened and finished.startswith(opened):
            end_of_turn = _common_ending(finished, answered)
            written = finished.removeprefix(opened).removesuffix(end_of_turn)
            if plan.tool_name in written:
                return written
        call = {"name": plan.tool_name, "arguments": plan.arguments}
        return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def _mean_logprobs(samples: Sequence[SampledText]) -> list[float]:
    """Return each sample's mean log-probability; empty ones are left out."""
    return [mean(sample.logprobs) for sample in samples if sample.logprobs]


def _common_ending(left: str, right: str) -> str:
    """Return the longest text that both end with."""
    length = 0
    for ours, theirs in zip(reversed(left), reversed(right), strict=False):
        if ours != theirs:
            break
        length += 1
    return left[len(left) - length :]
