"""Write docs/continuation.md from what the tests expect of each cell of the matrix."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.unit.continuation.expected import RANK, RESUMING, STOCK, read_expected
from tests.unit.continuation.matrix import NEVER, Outcome
from tests.unit.continuation.moments import AFTER_FINISH, AT_LAST, BEFORE, MOMENTS
from tests.unit.continuation.requests import (
    CHAT,
    CHOICES,
    COMPLETIONS,
    ENDPOINTS,
    GENERATE,
    KINDS,
    LOGPROBS,
    MESSAGES,
    RESPONSES,
    TEXT_KINDS,
    not_applicable,
)

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks/results/continuation_matrix.json"
WORDS = {
    Outcome.EXACT: "goes on",
    Outcome.MEANING: "goes on, details differ",
    Outcome.AGAIN: "starts again",
    Outcome.ERROR: "**error**",
}
COLUMNS = {
    BEFORE: "before the first token",
    "in the thought": "thought",
    "in the text": "text",
    "in a tool call's name": "call's name",
    "in its arguments": "arguments",
    AT_LAST: "last token",
    AFTER_FINISH: "after the finish reason",
}
ENDPOINT_WORDS = {
    GENERATE: "`/generate`",
    COMPLETIONS: "completions",
    CHAT: "chat",
    MESSAGES: "messages",
    RESPONSES: "responses",
}
KIND_WORDS = {
    LOGPROBS: "log-probabilities",
    CHOICES: "several choices (`n`)",
    "JSON schema": "JSON schema",
    "adapter": "LoRA adapter",
    "drafts": "drafts (speculative decoding)",
}
PAGE = """# When an engine fails within an answer

<!-- Written by scripts/docs.py from tests/data/continuation/expected.json: do not edit. -->

What a client gets of a streamed answer whose engine dies, stalls or reports an error, by what the answer is and where
it breaks off. How the router finds another engine is in [operations.md](operations.md#failover).

- *goes on*: another engine continues. The client gets one stream that looks as if the first engine had sent all of it:
  ids, numbers of events, finish reason and `usage` included.
- *starts again*: nothing that binds the client had been sent, so another engine answers from the beginning.
- **error**: the stream ends with an error event of its API. What came before is right, but incomplete.

Never: a wrong answer, a part that comes twice, or an end in silence. [Tests](../tests/unit/continuation) play recorded
streams of vLLM 0.32 and break them off at each event and within each event; they fail if a row below gets
worse.{figures}

## Engines with QARR's plugin

Engines that `qarr up` starts, the image of `deploy/Containerfile.engine`, and others where `tiers/engine_plugin` is
installed. They announce it with the header `x-qarr-resume: 1`, and `GET /tiers` says `"resumes": true` of them. The
successor must have the plugin too.

{resuming}

{resuming_why}

## Engines without the plugin

Engines given by URL that run unmodified vLLM, or a vLLM release that the plugin does not know.

{stock}

{stock_why}

## In both cases

- After the finish reason only the last events are missing, such as `usage`. Nothing more is computed then.
- The tokens that follow may differ from those that the first engine would have chosen: sampling begins anew, and
  another precision may decide otherwise. Seeds and the penalties for presence and frequency count from the break on.
- `usage` counts up to the token that completes a stop string, also if the string spans a break. Where engines cannot
  tell which token that is (they fail, or special tokens lie within the string), it counts the fewest that the string
  can have taken: never too many.
- A required tier without another healthy replica ends with an error: `tier_policy` is kept to.
- Answers that are not streamed start again, except at `/generate`, where they go on like streams.
"""


@dataclass(slots=True)
class _Row:
    """Requests for which the same happens.

    Attributes:
        cells: The outcome by moment; a moment that no request of the row has is missing.
        endpoints: The endpoints of each kind.
    """

    why: str
    cells: dict[str, Outcome]
    endpoints: dict[str, list[str]] = field(default_factory=dict)

    def takes(self, cells: dict[str, Outcome], why: str) -> bool:
        """Tell whether what happens to another request is the same, as far as both have the moment."""
        return why == self.why and all(
            self.cells.get(moment, outcome) == outcome
            for moment, outcome in cells.items()
        )


def render() -> str:
    """Return the page."""
    expected = read_expected()
    tables = {}
    for engines in (RESUMING, STOCK):
        rows = _rows(expected[engines], engines)
        tables[engines] = _table(rows)
    return PAGE.format(
        figures=_figures(),
        resuming=tables[RESUMING],
        resuming_why=WHY_RESUMING,
        stock=tables[STOCK],
        stock_why=WHY_STOCK,
    )


def _rows(cells: dict[str, dict[str, str]], engines: str) -> list[_Row]:
    """Return the rows of a table, best first."""
    rows: list[_Row] = []
    for kind in KINDS:
        for endpoint in ENDPOINTS:
            if not_applicable(endpoint, kind) is not None:
                continue
            outcomes = {
                moment: Outcome(outcome)
                for moment, outcome in cells[f"{endpoint} {kind}"].items()
            }
            why = _why(endpoint, kind, engines)
            row = next((row for row in rows if row.takes(outcomes, why)), None)
            if row is None:
                row = _Row(why, {})
                rows.append(row)
            row.cells |= outcomes
            row.endpoints.setdefault(kind, []).append(endpoint)
    return sorted(rows, key=lambda row: sum(RANK[cell] for cell in row.cells.values()))


def _why(endpoint: str, kind: str, engines: str) -> str:
    """Return the name of what decides over a request's answer: only requests that share it share a row."""
    if kind in {LOGPROBS, CHOICES}:
        return kind
    if engines == RESUMING:
        return "resumed"
    if kind in TEXT_KINDS and endpoint in {GENERATE, COMPLETIONS, CHAT}:
        return "text"
    return "other"


WHY_RESUMING = """- *Text* at `/generate`, completions and chat: the next engine completes the token ids of prompt and answer
  (`/v1/completions`).
- Everything else that goes on: the next engine is sent the request itself with the token ids so far. It computes them
  with the prompt, feeds them to the grammar, the stop strings and the parsers, and begins its stream anew; the router
  drops what the client has. So a tool call keeps its id, is never sent twice, and its arguments stay whole.
- *Tool required*: in the name of the first call nothing has been sent yet. In that of a further call the answer goes
  on.
- *Log-probabilities*: those of the tokens before the break cannot be had again.
- *Several choices* (`n` or several prompts): they share one stream, and engines do not tell their tokens apart.
- A response with tools that the engine runs by itself (web search, MCP) ends with an error: it is several answers in
  one."""
WHY_STOCK = """- *Text* at `/generate`, completions and chat goes on as above, if the engine tells token ids (`return_token_ids`).
- Messages and responses: vLLM tells no token ids there.
- Thoughts, tool calls and schemas: a parser or grammar that begins in the middle would misread the rest. Chats with
  tools end with an error even while they answer with text.
- Images, audio and other parts that are not text have no token ids to continue from."""


def _table(rows: Iterable[_Row]) -> str:
    lines = [
        "| answer | " + " | ".join(COLUMNS.values()) + " |",
        "| --- |" + " --- |" * len(COLUMNS),
    ]
    for row in rows:
        cells = [
            WORDS[row.cells[moment]] if moment in row.cells else "-"
            for moment in MOMENTS
        ]
        lines.append(f"| {_label(row)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _label(row: _Row) -> str:
    """Return the kinds and endpoints of a row."""
    by_kinds: dict[tuple[str, ...], list[str]] = {}
    for endpoint in ENDPOINTS:
        kinds = tuple(
            kind for kind, places in row.endpoints.items() if endpoint in places
        )
        if kinds:
            by_kinds.setdefault(kinds, []).append(endpoint)
    if set(row.endpoints) >= {*KINDS} - {LOGPROBS, CHOICES}:
        return "everything else"
    if _is_everywhere(row):
        return _listed([KIND_WORDS.get(kind, kind) for kind in row.endpoints])
    parts = []
    for kinds, endpoints in by_kinds.items():
        kind_words = _listed([KIND_WORDS.get(kind, kind) for kind in kinds])
        places = _listed([ENDPOINT_WORDS[endpoint] for endpoint in endpoints])
        parts.append(f"{places}: {kind_words}")
    return "<br>".join(parts)


def _is_everywhere(row: _Row) -> bool:
    """Tell whether a row has all endpoints of its kinds."""
    return all(
        endpoint in endpoints or not_applicable(endpoint, kind) is not None
        for kind, endpoints in row.endpoints.items()
        for endpoint in ENDPOINTS
    )


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words)


def _figures() -> str:
    """Return a sentence with the benchmark's figures; nothing before it has run."""
    if not RESULTS.exists():
        return ""
    runs: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text("utf-8"))
    run = runs.get("after")
    if run is None or not run["random"]:
        return ""
    breaks = sum(run["random"].values())
    errors = run["random"].get(Outcome.ERROR.value, 0)
    wrong = sum(run["random"].get(outcome.value, 0) for outcome in NEVER)
    before = ""
    if "before" in runs and runs["before"]["random"]:
        earlier = runs["before"]["random"]
        before = (
            f" (before answers could be resumed:\n{earlier.get(Outcome.ERROR.value, 0):,} of "
            f"{sum(earlier.values()):,})"
        )
    return (
        f"\n\nA [benchmark](../benchmarks/results/continuation_matrix.txt) broke {breaks:,} answers at random, one to "
        f"three\ntimes each: {errors:,} ended with an error{before}, and {wrong} were wrong."
    )
