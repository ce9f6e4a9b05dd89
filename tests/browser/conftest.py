"""One browser for all tests of the page, and one loop that it and the router's servers run on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

import pytest
from playwright.async_api import Browser, Page, async_playwright, expect

from tests.browser.chromium import launched

# a bound for a busy machine; nothing waits for it but what fails
expect.set_options(timeout=30_000)


class Opened(Protocol):
    """Opens a page."""

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
    """Return what opens a page, and fails when anything went wrong on it."""

    @asynccontextmanager
    async def open_page(
        url: str, *, expected: tuple[str, ...] = (), **context: Any
    ) -> AsyncIterator[Page]:
        held = await browser.new_context(
            **{"viewport": {"width": 1440, "height": 900}, **context}
        )
        page = await held.new_page()
        page.set_default_timeout(20_000)
        wrong: list[str] = []
        page.on(
            "console",
            lambda m: wrong.append(m.text) if m.type in {"error", "warning"} else None,
        )
        page.on("pageerror", lambda error: wrong.append(str(error)))
        try:
            await page.goto(url)
            yield page
        finally:
            await held.close()
        assert not [
            text for text in wrong if not any(part in text for part in expected)
        ]

    return open_page
