"""One browser for all tests of the page, and one loop that it and the router's servers run on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

import pytest
from playwright.async_api import Browser, ConsoleMessage, Page, async_playwright, expect

from tests.browser.chromium import launched

# The bound is one for a busy machine; only a failing test waits for so long.
expect.set_options(timeout=30_000)


class Opened(Protocol):
    """The function that opens a page."""

    def __call__(
        self, url: str, *, expected: tuple[str, ...] = (), **context: Any
    ) -> AbstractAsyncContextManager[Page]:
        """Open an address in a context of its own; ``expected`` are parts of messages that its console may show."""


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
async def browser(anyio_backend: str) -> AsyncIterator[Browser]:
    async with async_playwright() as tool:
        running = await launched(tool)
        yield running
        await running.close()


@pytest.fixture
def opened(browser: Browser) -> Opened:
    """Return a function that opens a page, and that fails when its console shows an error or a warning."""

    @asynccontextmanager
    async def open_page(
        url: str, *, expected: tuple[str, ...] = (), **context: Any
    ) -> AsyncIterator[Page]:
        browser_context = await browser.new_context(
            **{"viewport": {"width": 1440, "height": 900}, **context}
        )
        page = await browser_context.new_page()
        page.set_default_timeout(20_000)
        wrong: list[str] = []

        def note(message: ConsoleMessage) -> None:
            if message.type in {"error", "warning"}:
                wrong.append(message.text)

        page.on("console", note)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        try:
            await page.goto(url)
            yield page
        finally:
            await browser_context.close()
        for text in wrong:
            assert any(part in text for part in expected), text

    return open_page
