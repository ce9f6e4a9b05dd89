"""Requests that nobody asked for: arrivals as a Poisson process, and a mix of prompts, so that a router has work."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from collections.abc import Sequence

WITH_SLA, WITH_HINT = 0.4, 0.06  # shares of requests
TIMEOUT_S = 120.0
SUBJECTS = (
    "a lighthouse",
    "tides",
    "sourdough bread",
    "a bicycle bell",
    "compound interest",
    "bees",
    "train timetables",
)
CODE = "def mean(values):\n    return sum(values) / len(values)\n"
PAGE = (
    "At the meeting of {n} May the council looked at the estimate for {subject}. The engineer said that the work would "
    "take {n} weeks and cost {n},400 euros. Ann Lee asked who would pay if it took longer; the answer was put off. "
)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of prompt: how often it comes, its texts, and how many pages of a document come with it."""

    weight: float
    texts: Sequence[str]
    pages: tuple[int, int] = (0, 0)


KINDS = (
    Kind(
        0.30, ("Hello! How are you today?", "What is {subject}?", "Thanks. Who invented {subject}?", "Tell me a joke.")
    ),
    Kind(
        0.14, ("Write a story about {subject}, in {n} sentences.", "Write a polite letter that asks about {subject}.")
    ),
    Kind(
        0.22,
        (
            "Write a Python function that stores {subject} in a list sorted by price, with type hints and a docstring.",
            CODE + "\nWhy does this fail for an empty list? Fix it, and add {n} tests.",
            "Write an SQL query: the {n} customers who bought most of {subject} last year, by month.",
        ),
    ),
    Kind(
        0.10,
        (
            "A train leaves at 14:05 and travels {n}12 km at 96 km/h. When does it arrive? Show your steps.",
            "What is {n} percent of {n}40, and what is it after {n} years at 3 % interest? Prove it.",
        ),
    ),
    Kind(0.10, ("Übersetze ins Englische: Der Zug hat {n} Minuten Verspätung.", "Explique {subject} à un enfant.")),
    Kind(0.14, ("Summarise these minutes in {n} points.\n\n", "List every date and sum here as JSON.\n\n"), (3, 60)),
)


def some_request(chance: random.Random) -> dict[str, Any]:
    """Return a request's body for ``POST /generate``."""
    kind = chance.choices(KINDS, [kind.weight for kind in KINDS])[0]
    text = chance.choice(kind.texts) + PAGE * chance.randint(*kind.pages)
    prompt = text.replace("{subject}", chance.choice(SUBJECTS)).replace("{n}", str(chance.randint(2, 28)))
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": chance.choice((64, 256, 400))}
    if chance.random() < WITH_SLA:
        body["sla"] = chance.choice(({"ttft_ms": 400}, {"ttft_ms": 1000}, {"tpot_ms": 20}, {"max_quality_loss": 0.002}))
    if chance.random() < WITH_HINT:
        body["tier"] = chance.choice(("precise", "balanced", "fast"))
    return body


async def send_load(url: str, per_s: float) -> None:
    """Send requests to a router while it is ready, until cancelled; how they end is seen at the router."""
    chance = random.Random()  # noqa: S311  no secret
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=TIMEOUT_S, limits=limits, verify=False) as client,  # noqa: S501  loopback
        asyncio.TaskGroup() as open_requests,
    ):
        while True:
            if await _ready(client):
                open_requests.create_task(_answered(client, some_request(chance)))
            await asyncio.sleep(chance.expovariate(per_s))


async def _ready(client: httpx.AsyncClient) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return (await client.get("/readyz")).is_success
    return False


async def _answered(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    with contextlib.suppress(httpx.HTTPError):
        async with client.stream("POST", "/generate", json=body) as answer:
            async for _ in answer.aiter_raw():
                pass
