"""Make the pictures of the page in docs/images.

usage: .venv/bin/python scripts/screenshots.py [NAME...]

page-light, page-dark, prompt and phone show `qarr demo` a minute after its start: README has the first two. trace, loss and
first-start show what the demo does not have, on fake engines: a failure, measured losses, a checkpoint that is being made.
A name makes one picture alone. Needs Chromium (scripts/setup services).

dashboards, only by its name, shows Grafana's dashboards in build/dashboards: the tests' two routers under load for two
minutes, each panel's queries answered by a real Prometheus, drawn by tests/deploy/panel_drawing.py. It also prints which
panels are empty and what did not fit. A second of its time stands for 15 in production: scrapes, rules and rates are as
much faster. Needs Prometheus and Alertmanager as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from playwright.async_api import ViewportSize, async_playwright

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from router.auth.api_keys import add_key  # noqa: E402
from tests.browser.chromium import launched  # noqa: E402
from tests.browser.made_up import ANSWER, FAST, SPEEDS, measured  # noqa: E402
from tests.deploy.monitoring import Monitoring, monitoring  # noqa: E402
from tests.deploy.panel_drawing import Drawn, Window, draw_dashboard  # noqa: E402
from tests.deploy.panels import DASHBOARDS, Panel, panels_of, series_of  # noqa: E402
from tests.deploy.traffic import BALANCED, Routers, two_routers  # noqa: E402
from tests.fakes.engine import Behaviour  # noqa: E402
from tests.ports import reserved_ports  # noqa: E402
from tests.unit.first_up import first_up  # noqa: E402
from tests.unit.own_router import QARR  # noqa: E402
from tests.unit.router_stack import Stack, router_stack  # noqa: E402
from tests.waiting import until  # noqa: E402
from tiers.spec import PRECISIONS, STANDARD_TIERS  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from playwright.async_api import Browser, Locator, Page

IMAGES = PROJECT / "docs/images"
DASHBOARD_IMAGES = PROJECT / "build/dashboards"
SEED = 7
REQUESTS_PER_S = 2.6
WITH_SLA, WITH_HINT = 0.45, 0.08  # shares of requests
BUSY_S = 40.0  # until the plots over time have something to show
DEMO_BUSY_S = 60.0  # what a person sees after a minute
DEMO_START_S = 60.0
DEMO_END_S = 30.0
SCRAPE_S, RATE_INTERVAL = 1.0, "4s"  # Grafana's: four scrapes
SHOWN_S = 150.0  # what the dashboards show
SOUND_S, FAILING_S, TIER_DOWN_S = 50.0, 4.0, 25.0
# What an element does not show, and which panels are empty.
FAULTS = """() => [
  ...[...document.querySelectorAll('.empty')].map(node => `${node.dataset.panel}: no data`),
  ...[...document.querySelectorAll('.fits')]
    .filter(node => node.scrollWidth > node.clientWidth + 1 || node.scrollHeight > node.clientHeight + 1)
    .map(node => `${node.dataset.panel}: ${node.classList[1]} is cut`),
]"""
OF_DEMO = ("page-light", "page-dark", "prompt", "phone")
OF_FAKES = ("trace", "loss")
MADE_UP = {
    "server": {
        "notice": "Fake engines, made-up load: the picture shows what the page does."
    },
    "tiers": {tier: {"precision": precision} for tier, precision in PRECISIONS.items()},
}
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
                behaviour.first_delay_s = SPEEDS.get(tier, SPEEDS[FAST])[
                    0
                ] * chance.lognormvariate(0, 0.35)
                behaviour.kv_cache_usage = min(
                    0.97, 0.04 + 0.035 * behaviour.running + 0.01 * chance.random()
                )
                behaviour.prompt_tokens = int(chance.lognormvariate(4.6, 0.8))
            group.create_task(answered(stack, some_request(chance)))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    enough.wait(), chance.expovariate(REQUESTS_PER_S)
                )


async def fail_once(stack: Stack) -> str:
    """Let an engine fail midway through an answer, which goes on elsewhere; return the request's id."""
    engine = stack.engines[FAST]
    engine.break_after = 14
    answer = await stack.generate(
        prompt=PROMPTS[0], max_tokens=48, tier="fast", sla={"ttft_ms": 1500}
    )
    engine.break_after = None
    return str(answer.headers["x-request-id"])


@contextlib.asynccontextmanager
async def demo() -> AsyncIterator[str]:
    """Run ``qarr demo`` as a person does, with its own load; yield its address when all tiers are ready."""
    (port,) = reserved_ports()
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "QARR_CACHE_DIR": folder, "XDG_RUNTIME_DIR": folder}
        argv = [QARR, "demo", "--port", str(port)]
        process = await asyncio.create_subprocess_exec(
            *argv, stderr=asyncio.subprocess.PIPE, env=env
        )
        try:
            assert process.stderr is not None
            async with asyncio.timeout(DEMO_START_S):
                while b"all tiers ready" not in (
                    line := await process.stderr.readline()
                ):
                    assert line, "qarr demo ended: run it to see why"
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGINT)
            await asyncio.wait_for(process.communicate(), DEMO_END_S)


@contextlib.asynccontextmanager
async def opened(browser: Browser, url: str, name: str) -> AsyncIterator[Page]:
    """Open the page as a picture wants it."""
    scheme = "dark" if name == "page-dark" else "light"
    viewport = PHONE if name == "phone" else WIDE
    context = await browser.new_context(viewport=viewport, color_scheme=scheme)
    page = await context.new_page()
    await page.goto(url)
    await page.get_by_text("● live").wait_for()
    yield page
    await context.close()


async def keep(shown: Page | Locator, name: str) -> None:
    """Write a picture."""
    path = IMAGES / f"{name}.png"
    # bars have their final lengths
    await shown.screenshot(path=path, animations="disabled")
    print(f"docs/images/{name}.png: {path.stat().st_size // 1024} kB")


def panel(page: Page, part: str) -> Locator:
    """Return the panel around a part of the page."""
    return page.locator("section", has=page.locator(part))


async def demo_shots(browser: Browser, names: list[str]) -> None:
    """Take the pictures of ``qarr demo``: the pages are open from its start, so that their plots are full."""
    async with demo() as url, contextlib.AsyncExitStack() as stack:
        pages = {
            name: await stack.enter_async_context(opened(browser, url, name))
            for name in names
        }
        await asyncio.sleep(DEMO_BUSY_S)
        for name, page in pages.items():
            if name not in {"prompt", "phone"}:
                await keep(page, name)
                continue
            await page.get_by_label("Prompt", exact=True).fill(PROMPTS[3])
            await page.locator("#decision .verdicts").wait_for()
            await page.get_by_role("button", name="Send").click()
            await page.get_by_text("first token here").wait_for()
            await page.locator("#ask").evaluate(
                "node => node.closest('section').scrollIntoView({block: 'start'})"
            )
            await keep(page if name == "phone" else panel(page, "#ask"), name)


async def fake_shots(browser: Browser, stack: Stack, names: list[str]) -> None:
    """Take the pictures of what the demo does not have."""
    for name in names:
        async with opened(browser, stack.url, name) as page:
            if name == "loss":
                await asyncio.sleep(BUSY_S)
                await keep(panel(page, "#quality"), name)
                continue
            failed = await fail_once(stack)
            await (
                page.locator(f'tr[data-request="{failed}"]')
                .get_by_role("button")
                .press("Enter")
            )
            await page.locator(".waterfall li").first.wait_for()
            await keep(page, name)


async def first_start(browser: Browser, folder: Path) -> None:
    """Take the picture of a router whose last checkpoint is being made."""
    context = await browser.new_context(
        viewport=ViewportSize(width=1440, height=560), color_scheme="light"
    )
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
        print(
            f"docs/images/first-start.png: {(IMAGES / 'first-start.png').stat().st_size // 1024} kB"
        )
    await context.close()


async def busy_routers(routers: Routers, folder: Path) -> float:
    """Put load on two routers, with two keys; an engine fails for a while, and at last a tier is down. Return the end."""
    await routers.everything()
    key, _ = add_key(folder / "keys.json", "ben")
    enough = asyncio.Event()
    async with (
        httpx.AsyncClient(timeout=60, trust_env=False) as client,
        asyncio.TaskGroup() as group,
    ):
        client.headers["authorization"] = f"Bearer {key}"
        for stack in routers.stacks:
            for tier, behaviour in stack.engines.items():
                behaviour.answer, behaviour.delay_s = (
                    ANSWER,
                    SPEEDS.get(tier, SPEEDS[FAST])[1],
                )
            group.create_task(load(stack, enough))
            group.create_task(load(replace(stack, client=client), enough))
        await asyncio.sleep(SOUND_S)
        for stack in routers.stacks:
            stack.engines[FAST].break_after = 3
        await asyncio.sleep(FAILING_S)
        for stack in routers.stacks:
            stack.engines[FAST].break_after = None
        await asyncio.sleep(SOUND_S / 2)
        for stack in routers.stacks:
            stack.engines[BALANCED].alive = False
        await asyncio.sleep(TIER_DOWN_S)
        end = float(int(time.time()))
        enough.set()
    return end


async def answered_panel(prometheus: Monitoring, panel: Panel, window: Window) -> Drawn:
    """Ask Prometheus what Grafana would ask for a panel."""
    series, exemplars = [], []
    for query in panel.queries:
        if query.instant:
            found = await prometheus.query(query.expr, at=window.end)
        else:
            found = await prometheus.query_range(
                query.expr, start=window.start, end=window.end, step=window.step
            )
        series += series_of(query, found)
        if query.exemplars:
            exemplars += await prometheus.exemplars(
                query.expr, start=window.start, end=window.end
            )
    points = tuple((each["timestamp"], float(each["value"])) for each in exemplars)
    return Drawn(panel, series, points)


async def dashboard_shots(browser: Browser) -> None:
    """Take a picture of each dashboard after everything has happened, and print what is wrong with its panels."""
    DASHBOARD_IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ.update(XDG_CONFIG_HOME=name)
        async with (
            two_routers(folder) as routers,
            monitoring(folder, routers) as prometheus,
        ):
            # every series is there once before it grows: a rate needs two points
            await routers.ordinary()
            await until(lambda: prometheus.query("job:qarr_requests:sum > 0"))
            end = await busy_routers(routers, folder)
            window = Window(start=end - SHOWN_S, end=end, step=SCRAPE_S)
            for uid, dashboard in DASHBOARDS.items():
                panels = panels_of(
                    dashboard, rate_interval=RATE_INTERVAL, shown=f"{SHOWN_S:.0f}s"
                )
                drawn = [
                    await answered_panel(prometheus, panel, window) for panel in panels
                ]
                page = await browser.new_page(viewport=WIDE)
                await page.set_content(
                    draw_dashboard(dashboard["title"], drawn, window)
                )
                await page.screenshot(
                    path=DASHBOARD_IMAGES / f"{uid}.png", full_page=True
                )
                print(
                    f"build/dashboards/{uid}.png",
                    *await page.evaluate(FAULTS),
                    sep="\n  ",
                )
                await page.close()


async def main(wanted: list[str]) -> None:
    """Take the pictures that are wanted; without a name, all."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    every = (*OF_DEMO, *OF_FAKES, "first-start")
    if strange := [name for name in wanted if name not in {*every, "dashboards"}]:
        raise SystemExit(
            f"{', '.join(strange)}: there are {', '.join(every)}, dashboards"
        )
    names = wanted or list(every)
    with tempfile.TemporaryDirectory() as folder:
        async with async_playwright() as tool:
            browser = await launched(tool)
            if "first-start" in names:
                await first_start(browser, Path(folder))
            if of_demo := [name for name in OF_DEMO if name in names]:
                await demo_shots(browser, of_demo)
            if of_fakes := [name for name in OF_FAKES if name in names]:
                await busy_fakes(browser, of_fakes)
            if "dashboards" in names:
                await dashboard_shots(browser)
            await browser.close()


async def busy_fakes(browser: Browser, names: list[str]) -> None:
    """Run a router under load in front of fake engines, and take its pictures."""
    behaviours = {
        t: Behaviour(answer=ANSWER, delay_s=SPEEDS[t][1], first_delay_s=SPEEDS[t][0])
        for t in STANDARD_TIERS
    }
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(XDG_CONFIG_HOME=folder, QARR_POLICY__PROFILES=folder)
        async with router_stack(
            Path(folder), MADE_UP, model="no model", **behaviours
        ) as stack:
            await measured(stack, Path(folder))
            enough = asyncio.Event()
            loading = asyncio.create_task(load(stack, enough))
            await asyncio.sleep(BUSY_S / 3)
            await fake_shots(browser, stack, names)
            enough.set()
            await loading


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
