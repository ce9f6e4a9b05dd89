"""Answers that break anywhere, against the same answers unbroken: what a client gets must not tell the difference.

usage: python benchmarks/chaos/continuations.py [--seeds 1-20] [--rounds 400] [--detokenize works fails odd]

Each round makes up an answer (tokens that cut characters, special tokens, text that is no UTF-8), a request (stop strings, a
limit, usage) and where up to three engines break it off, and asks once without and once with those breaks. An error event
is an honest end where no engine can tell the text that its tokens have: with ``fails``, /detokenize works nowhere, with
``odd``, it answers differently on each engine. The same seed makes the same rounds. Ends with status 1 if a text was wrong,
or ended as whole and was not, or was counted wrongly, or if the router kept a lease.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from tests.unit.router_stack import Stack, router_stack  # noqa: E402
from tiers.breaker import BreakerOptions  # noqa: E402
from tiers.spec import STANDARD_TIERS  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

SHOWN = 20
# What answers are made of; the last has bytes that are no UTF-8.
TEXTS = (
    "ab",
    "ab c",
    "a\u00e9b\u4f60\U0001f600 ",
    "ENDab",
    "\nUser: a",
    "\u00e9\u4f60",
    "a\ufffd b",
)
ALPHABETS = (
    *([character.encode() for character in text] for text in TEXTS),
    [b"a", b" ", b"\xc3", b"\xa9", b"\xff"],
)
PATHS = {
    "chat": "/v1/chat/completions",
    "text": "/v1/completions",
    "generate": "/generate",
}
ODD = ({}, {"prompt": 5}, [], {"prompt": ""})
SETTINGS = {
    "upstream": {
        "breaker": BreakerOptions(10**6, 1.0),
        "retry_reserve": 10**6,
        "attempts": 5,
    }
}


@dataclass(frozen=True, slots=True)
class Round:
    """One answer, one request for it, and where engines break it off.

    Attributes:
        tokens: Of the answer.
        breaks: Events after which each engine closes the connection, once; None: it does not.
    """

    tokens: tuple[bytes, ...]
    special: tuple[int, ...]
    group: int
    kind: str
    body: dict[str, Any]
    breaks: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Got:
    """What a client got."""

    status: int
    text: str = ""
    finish: str | None = None
    stop: Any = None
    usage: tuple[tuple[int, ...], ...] = ()
    ends: int = 0
    errors: int = 0


@dataclass(slots=True)
class Report:
    """What was seen, of one way in which /detokenize answers."""

    rounds: int = 0
    broken: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def main() -> None:
    """Run it all and print the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="1-20")
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument(
        "--detokenize",
        nargs="+",
        choices=("works", "fails", "odd"),
        default=["works", "fails", "odd"],
    )
    args = parser.parse_args()
    for name in [name for name in os.environ if name.startswith(("QARR_", "OTEL_"))]:
        del os.environ[name]
    for name in ("qarr.router", "qarr.request", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    first, _, last = args.seeds.partition("-")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"XDG_CONFIG_HOME": folder, "QARR_CACHE_DIR": folder}
        reports = asyncio.run(
            _all(
                Path(folder),
                range(int(first), int(last or first) + 1),
                args.rounds,
                args.detokenize,
            )
        )
    _show(reports, time.monotonic() - started, args)
    sys.exit(1 if any(report.faults for report in reports.values()) else 0)


async def _all(
    folder: Path, seeds: Sequence[int], rounds: int, ways: Sequence[str]
) -> dict[str, Report]:
    reports = {way: Report() for way in ways}
    async with router_stack(folder, SETTINGS) as stack:
        for behaviour in stack.engines.values():
            behaviour.prompt_tokens = 3  # as many as it says the prompt's ids are
        for way, report in reports.items():
            for seed in seeds:
                rng = random.Random(f"{seed} {way == 'odd'}")
                for number in range(rounds):
                    await _try(
                        stack,
                        make_round(rng),
                        way,
                        rng,
                        report,
                        f"seed {seed}, round {number}, {way}",
                    )
            if stack.leases():
                report.faults.append(f"{stack.leases()} leases were kept")
    return reports


def make_round(rng: random.Random) -> Round:
    """Make one up."""
    alphabet = rng.choice(ALPHABETS)
    kind = rng.choice(("chat", "text", "chat", "text", "generate"))
    answer = b"".join(rng.choices(alphabet, k=rng.randint(1, 40)))
    tokens = _chopped(rng, answer, rng.choice((1, 2, 4, 7)))
    body: dict[str, Any] = {
        "stream": True,
        "max_tokens": len(tokens) + rng.randint(1, 50),
    }
    if rng.random() < 0.4:
        body["max_tokens"] = rng.randint(1, len(tokens) + 1)
    if kind != "generate":
        stops = [_stop(rng, alphabet) for _ in range(rng.randint(0, 3))]
        if stops:
            body["stop"] = stops if rng.random() < 0.8 else stops[0]
        if rng.random() < 0.2:
            body["include_stop_str_in_output"] = True
        if rng.random() < 0.1:
            body["min_tokens"] = rng.randint(1, body["max_tokens"])
        if rng.random() < 0.6:
            body["stream_options"] = {"include_usage": True}
    asked = (
        {"messages": [{"role": "user", "content": "x"}]}
        if kind == "chat"
        else {"prompt": "x"}
    )
    group, engines = rng.choice((1, 1, 1, 2, 3)), rng.randint(1, 3)
    special = (
        tuple(n for n in range(len(tokens)) if rng.random() < 0.15)
        if rng.random() < 0.2
        else ()
    )
    # past the end as well: the finish reason, the counts
    furthest = max(1, min(len(tokens), 12) // group) + 3
    breaks = tuple(
        rng.randint(1, furthest) if number < engines else None for number in range(3)
    )
    return Round(tokens, special, group, kind, {**body, **asked}, breaks)


def _chopped(rng: random.Random, answer: bytes, most: int) -> tuple[bytes, ...]:
    tokens: list[bytes] = []
    at = 0
    while at < len(answer):
        size = rng.randint(1, most)
        tokens.append(answer[at : at + size])
        at += size
    return tuple(tokens)


def _stop(rng: random.Random, alphabet: Sequence[bytes]) -> str:
    return b"".join(rng.choices(alphabet, k=rng.randint(1, 6))).decode(
        "utf-8", "replace"
    )


async def _try(
    stack: Stack, one: Round, way: str, rng: random.Random, report: Report, where: str
) -> None:
    """Ask without the breaks and with them, and compare."""
    engines = [stack.engines[tier] for tier in STANDARD_TIERS]
    for behaviour in engines:
        behaviour.answer, behaviour.special, behaviour.group, behaviour.once = (
            one.tokens,
            one.special,
            one.group,
            True,
        )
        behaviour.detokenizes = way == "works" or (way == "odd" and rng.random() < 0.7)
        behaviour.told = (
            rng.choice(ODD) if way == "odd" and rng.random() < 0.3 else None
        )
    whole = await _ask(stack, one)
    for behaviour, events in zip(engines, one.breaks, strict=True):
        behaviour.break_at = events
    got = await _ask(stack, one)
    broken = sum(
        b.break_at is None
        for b, events in zip(engines, one.breaks, strict=True)
        if events is not None
    )
    for behaviour in engines:
        behaviour.break_at = None
    report.rounds += 1
    report.broken += bool(broken)
    # Which token completes a stop string cannot always be told; then too few count, never too many.
    may_count_fewer = way != "works" or bool(one.special)
    end = _judged(whole, got, may_count_fewer=may_count_fewer)
    report.ends[end if broken else "unbroken"] += 1
    if end.startswith("WRONG"):
        report.faults.append(
            f"{where}: {end}\n    {one}\n    whole {whole}\n    got   {got}"
        )


def _judged(whole: Got, got: Got, *, may_count_fewer: bool) -> str:
    """Return how an answer ended, in words."""
    if got == whole:
        return "whole"
    if (
        may_count_fewer
        and whole.stop
        and got.usage < whole.usage
        and replace(got, usage=whole.usage) == whole
    ):
        return "whole, some tokens of its stop string not counted"
    if got.status != 200:
        return (
            "refused before the first token"
            if got.status in {502, 503}
            else f"WRONG status {got.status}"
        )
    if got.errors == 1 and not got.ends:
        return (
            "error event"
            if whole.text.startswith(got.text)
            else "WRONG text before an error event"
        )
    for name in ("text", "finish", "stop", "usage", "ends", "errors"):
        if getattr(got, name) != getattr(whole, name):
            return f"WRONG {name}"
    return "WRONG"


async def _ask(stack: Stack, one: Round) -> Got:
    answer = await stack.client.post(stack.url + PATHS[one.kind], json=one.body)
    if answer.status_code != 200:
        return Got(answer.status_code)
    return (
        _read_generated(answer.text)
        if one.kind == "generate"
        else _read(answer.text, chat=one.kind == "chat")
    )


def _read(text: str, *, chat: bool) -> Got:
    said, finish, stop, usage, ends, errors = "", None, None, [], 0, 0
    for block in text.split("\n\n"):
        # without comments
        event = "\n".join(
            line for line in block.split("\n") if not line.startswith(":")
        )
        if not event.startswith("data:"):
            continue
        if event == "data: [DONE]":
            ends += 1
            continue
        chunk = json.loads(event[5:])
        errors += "error" in chunk
        if counts := chunk.get("usage"):
            usage.append(_counts(counts))
        for choice in chunk.get("choices", ()):
            said += (choice["delta"].get("content") or "") if chat else choice["text"]
            if choice.get("finish_reason"):
                finish, stop = choice["finish_reason"], choice.get("stop_reason")
    return Got(200, said, finish, stop, tuple(usage), ends, errors)


def _read_generated(text: str) -> Got:
    said, last, errors = "", {}, 0
    for event in text.strip().split("\n\n"):
        data = json.loads(event.rpartition("data: ")[2])
        if "event: done" in event:
            last = data
        errors += "event: error" in event
        said += data.get("text", "")
    usage = (_counts(last["usage"]),) if last else ()
    return Got(
        200, said, last.get("finish_reason"), None, usage, int(bool(last)), errors
    )


def _counts(usage: dict[str, int]) -> tuple[int, ...]:
    return usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]


def _show(reports: dict[str, Report], took_s: float, args: argparse.Namespace) -> None:
    ways = " ".join(args.detokenize)
    print(
        f"$ python benchmarks/chaos/continuations.py --seeds {args.seeds} --rounds {args.rounds} --detokenize {ways}\n"
    )
    for way, report in reports.items():
        ends = ", ".join(
            f"{end}: {count}" for end, count in sorted(report.ends.items())
        )
        print(
            f"/detokenize {way:6} {report.rounds} rounds, {report.broken} broken off; {ends}; faults: {len(report.faults)}"
        )
    print(f"\n{took_s:.0f} s")
    for fault in [fault for report in reports.values() for fault in report.faults][
        :SHOWN
    ]:
        print(f"FAULT {fault}")


if __name__ == "__main__":
    main()
