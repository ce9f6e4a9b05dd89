"""Make the pictures of the page in docs/images, of a router in front of fake engines under made-up load.

usage: .venv/bin/python scripts/screenshots.py [NAME...]

Needs Chromium (scripts/setup services). A name makes one picture alone: page-light, page-dark, trace, prompt, phone, loss,
first-start.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from playwright.async_api import ViewportSize, async_playwright

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from tests.browser.chromium import launched  # noqa: E402
from tests.browser.made_up import ANSWER, FAST, SPEEDS, measured  # noqa: E402
from tests.fakes.engine import Behaviour  # noqa: E402
from tests.unit.first_up import first_up  # noqa: E402
from tests.unit.router_stack import Stack, router_stack  # noqa: E402
from tiers.spec import STANDARD_TIERS  # noqa: E402

if TYPE_CHECKING:
    from playwright.async_api import Browser

IMAGES = PROJECT / "docs/images"
SEED = 7
REQUESTS_PER_S = 2.6
WITH_SLA, WITH_HINT = 0.45, 0.08  # shares of requests
BUSY_S = 40.0  # until the plots over time have something to show
WIDE, PHONE = ViewportSize(width=1440, height=900), ViewportSize(width=390, height=844)
PROMPTS = (
    "What is the capital of France?",
    "Could you tell me how to get rid of the smell of paint in a small room?",
    "Write a short story about a lighthouse keeper who collects maps.",
    "Write a Python function that merges two sorted lists, with type hints and a docstring.",
    "def mean(xs):\n    return sum(xs) / len(xs)\n\nWhy does this fail for an empty list? Fix it.",
    "A train leaves at 14:05 and travels 312 km at 96 km/h. When does it arrive? Show your steps.",
    "Übersetze ins Englische: Der Zug hat heute leider zwanzig Minuten Verspätung, bitte warten Sie am Gleis.",
    "Extract every date and amount from this letter as JSON: on 3 May we paid 420 euros, on 9 June 133 euros.",
    "Summarise the following minutes in three bullet points: the budget was agreed, the roof is late, Ann leaves in May.",
)


def some_request(chance: random.Random) -> dict[str, Any]:
    """Return a request's body."""
    body: dict[str, Any] = {
        "prompt": chance.choice(PROMPTS),
        "max_tokens": 4 + int(chance.lognormvariate(4.2, 0.7)) % 300,
    }
    if chance.random() < WITH_SLA:
        body["sla"] = {"ttft_ms": chance.choice((800, 1200, 2000))}
    if chance.random() < WITH_HINT:
        body["tier"] = chance.choice(("precise", "balanced"))
    return body


async def answered(stack: Stack, body: dict[str, Any]) -> None:
    """Send one request; one that meets a kept connection's end is not asked again."""
    with contextlib.suppress(httpx.TransportError):
        await stack.generate(**body)


async def load(stack: Stack, enough: asyncio.Event) -> None:
    """Send requests of all kinds until it is enough, and wait for their answers."""
    chance = random.Random(SEED)
    async with asyncio.TaskGroup() as group:
        while not enough.is_set():
            for tier, behaviour in stack.engines.items():
                behaviour.first_delay_s = SPEEDS[tier][0] * chance.lognormvariate(0, 0.35)
                behaviour.kv_cache_usage = min(0.97, 0.04 + 0.035 * behaviour.running + 0.01 * chance.random())
                behaviour.prompt_tokens = int(chance.lognormvariate(4.6, 0.8))
            group.create_task(answered(stack, some_request(chance)))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(enough.wait(), chance.expovariate(REQUESTS_PER_S))


async def fail_once(stack: Stack) -> str:
    """Let an engine fail midway through an answer, which goes on elsewhere; return the request's id."""
    engine = stack.engines[FAST]
    engine.break_after = 14
    answer = await stack.generate(prompt=PROMPTS[0], max_tokens=48, tier="fast", sla={"ttft_ms": 1500})
    engine.break_after = None
    return str(answer.headers["x-request-id"])


async def shots(browser: Browser, stack: Stack, wanted: list[str]) -> None:
    """Take the pictures that are wanted, of all."""
    for name, (scheme, viewport) in {
        "page-light": ("light", WIDE),
        "page-dark": ("dark", WIDE),
        "trace": ("light", WIDE),
        "prompt": ("light", WIDE),
        "phone": ("light", PHONE),
        "loss": ("light", WIDE),
    }.items():
        if wanted and name not in wanted:
            continue
        context = await browser.new_context(viewport=viewport, color_scheme=scheme)
        page = await context.new_page()
        await page.goto(stack.url)
        await page.get_by_text("● live").wait_for()
        if name in {"page-light", "page-dark", "loss"}:
            await asyncio.sleep(BUSY_S)
        elif name == "trace":
            failed = await fail_once(stack)
            await page.locator(f'tr[data-request="{failed}"]').get_by_role("button").press("Enter")
            await page.locator(".waterfall li").first.wait_for()
        else:
            await page.get_by_label("Prompt", exact=True).fill(PROMPTS[3])
            await page.locator("#decision .verdicts").wait_for()
            await page.get_by_role("button", name="Send").click()
            await page.get_by_text("first token here").wait_for()
            await page.locator("#ask").evaluate("node => node.closest('section').scrollIntoView({block: 'start'})")
        part = {"prompt": "#ask", "loss": "#quality"}.get(name)
        shown = page if part is None else page.locator("section", has=page.locator(part))
        await shown.screenshot(path=IMAGES / f"{name}.png")
        print(f"docs/images/{name}.png: {(IMAGES / f'{name}.png').stat().st_size // 1024} kB")
        await context.close()


async def first_start(browser: Browser, folder: Path) -> None:
    """Take the picture of a router whose last checkpoint is being made."""
    context = await browser.new_context(viewport=ViewportSize(width=1440, height=560), color_scheme="light")
    async with first_up(folder) as up:
        up.tell("bf16", "done")
        up.tell("fp8", "done")
        await up.until_states(precise="ready", balanced="ready", fast="preparing")
        page = await context.new_page()
        await page.goto(up.url)
        for layer in range(1, 13):
            up.tell("awq", str(layer))
            await up.generate(prompt=PROMPTS[layer % len(PROMPTS)], max_tokens=16)
            await asyncio.sleep(2)
        await page.get_by_text("(12 of 31)").wait_for()
        await page.screenshot(path=IMAGES / "first-start.png")
        print(f"docs/images/first-start.png: {(IMAGES / 'first-start.png').stat().st_size // 1024} kB")
    await context.close()


async def main(wanted: list[str]) -> None:
    """Run a router under load, and a browser that looks at it."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    behaviours = {t: Behaviour(answer=ANSWER, delay_s=SPEEDS[t][1], first_delay_s=SPEEDS[t][0]) for t in STANDARD_TIERS}
    if not wanted or "first-start" in wanted:
        with tempfile.TemporaryDirectory() as folder:
            async with async_playwright() as tool:
                browser = await launched(tool)
                await first_start(browser, Path(folder))
                await browser.close()
    if wanted == ["first-start"]:
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(XDG_CONFIG_HOME=folder, QARR_POLICY__PROFILES=folder)
        async with router_stack(Path(folder), **behaviours) as stack, async_playwright() as tool:
            browser = await launched(tool)
            await measured(stack, Path(folder))
            enough = asyncio.Event()
            loading = asyncio.create_task(load(stack, enough))
            await asyncio.sleep(BUSY_S / 3)
            await shots(browser, stack, wanted)
            enough.set()
            await loading
            await browser.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
